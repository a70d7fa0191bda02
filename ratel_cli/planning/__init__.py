"""What fits, what moves and what it costs. Pure arithmetic."""
