"""Ranks on other hosts: an agent on each, the link to it, and the engine's way there."""
