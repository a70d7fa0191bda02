"""From rows of a file to packed micro-batches."""
