"""The search for the best plan, and the plan."""
