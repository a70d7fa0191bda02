"""The only part that moves bytes between memory and drives."""
