"""The content of `ratel plan`."""
