"""Assembles a run from the parts below. Each wing uses those before it: files, inputs, train, ask, start."""
