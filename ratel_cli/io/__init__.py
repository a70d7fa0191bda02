"""Moves bytes between memory and drives, whatever they are; only it reads and writes stores."""
