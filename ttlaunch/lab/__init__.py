"""Experiments on top of runs: simulate, compare layouts and recipes, inject faults."""
