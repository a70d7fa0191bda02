"""Weights on their way from drives to host memory, and rows of embeddings."""
