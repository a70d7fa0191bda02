"""Activations on their way to memory and drives and back."""
