"""A step as values, for the engine and the planner."""
