"""A base model's files: shards, names, quantised formats, and the skeleton they are imported into."""
