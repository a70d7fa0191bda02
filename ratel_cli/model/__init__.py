"""A Hugging Face model as blocks."""
