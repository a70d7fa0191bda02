"""Configs of other trainers."""
