"""A config to begin with, for `ratel init`."""
