"""What happens from step to step."""
