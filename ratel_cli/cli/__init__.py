"""Commands, their options, and what they print. Thin."""
