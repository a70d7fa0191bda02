"""A step as values: blocks, and the rules that update them. The engine follows them, the planner prices them. Pure."""
