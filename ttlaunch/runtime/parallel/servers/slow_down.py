"""Make a worker slower than it is, on purpose: for experiments with stragglers on machines that are all alike."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def slowed(factors: Mapping[int, float], place: int) -> Iterator[None]:
    """Let a block take so many times as long as it does: the rest of the time the rank sleeps, and its core is free.

    Args:
        factors: By place among the workers; those that are not named are as fast as they are.
        place: Of this one.
    """
    began = time.monotonic()
    yield
    if place in factors:
        time.sleep((factors[place] - 1) * (time.monotonic() - began))
