"""The keys of a config, their values and their relations."""
