"""Find the first failure of a run, by class and then by time, and describe it."""
