"""The micro-batches of a run."""
