"""A config's sources: formats, encoding, and what is said of rows."""
