"""A step of a run computed again, with everything in it described."""
