"""One step."""
