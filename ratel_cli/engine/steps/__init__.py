"""A step, and passes without one."""
