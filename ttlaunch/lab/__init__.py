"""Experiments on top of runs: simulate, compare layouts and recipes, break a run on purpose."""
