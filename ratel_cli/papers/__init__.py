"""What papers would plan, and their rivals: asked by `ratel plan` alone, nothing that trains imports it."""
