"""The memory of a step, of the host and of a GPU."""
