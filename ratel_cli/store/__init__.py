"""Generations of training state on NVMe."""
