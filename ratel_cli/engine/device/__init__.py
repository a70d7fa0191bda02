"""The device that computes, and the link to it."""
