"""The samples of every step, the same for any number of ranks."""
