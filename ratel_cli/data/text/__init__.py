"""Text and conversations as tokens."""
