"""Ratel: fine-tuning of models larger than GPU memory and RAM."""
