"""Fifteen minutes on a machine with a GPU: what to bring there, and one command that measures all."""
