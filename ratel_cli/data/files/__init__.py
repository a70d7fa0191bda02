"""Files with rows, and what of them is read."""
