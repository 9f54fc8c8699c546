"""Ranks on other hosts: an attendant on each, the link to it, and the engine's way there."""
