"""Checkpoints of a run: completed, lost, found again and read."""
