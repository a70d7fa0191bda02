"""The rows and plots that a person reads."""
