"""Segments of a model as a step runs them, with one protocol."""
