"""Ratel in one's own loop: what `import ratel_cli` offers."""
