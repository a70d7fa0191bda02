"""YAML with the places of what it says."""
