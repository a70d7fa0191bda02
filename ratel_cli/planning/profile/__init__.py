"""What a plan begins with: the model's costs, the step's placement, what a step offloads."""
