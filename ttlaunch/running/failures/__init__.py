"""Whose failure it was: causes by class, then by time, and how it is told."""
