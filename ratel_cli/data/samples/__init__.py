"""Samples as tokens: their cache, their packing, the batches of them."""
