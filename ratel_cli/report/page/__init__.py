"""What is drawn: the page of a run, curves, pictures."""
