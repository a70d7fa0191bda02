"""What a model is as values: its spec, its blocks' records, what layers carry."""
