"""How many examples a property is tried with: a quarter of them in every run, and all with `EVERY_EXAMPLE=1`."""

import os


def examples(count):
    """Return how many of so many examples this run tries."""
    return count if os.environ.get("EVERY_EXAMPLE") == "1" else max(10, count // 4)
