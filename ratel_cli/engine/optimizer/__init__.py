"""From gradients to updates."""
