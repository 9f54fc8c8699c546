"""Detect that a run hangs, find out which ranks wait for which, and name the rank that caused it."""
