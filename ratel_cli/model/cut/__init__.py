"""A model cut into segments: which module is a layer, what runs it, and trials that prove it."""
