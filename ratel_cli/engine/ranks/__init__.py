"""Several ranks, each of which stores and updates a slice of every block. One rank alone asks for nothing of this."""
