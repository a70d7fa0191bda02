"""The time and the bytes of a step, by resource."""
