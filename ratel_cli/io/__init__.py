"""Moves bytes between memory and the files of stores, whatever the bytes are; nothing else reads or writes them."""
