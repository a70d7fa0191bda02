"""Preference data: two answers that are compared."""
