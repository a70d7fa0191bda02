"""From YAML to a checked config."""
