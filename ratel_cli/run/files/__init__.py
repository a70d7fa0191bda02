"""What a run leaves on the drives, and whose each file is."""
