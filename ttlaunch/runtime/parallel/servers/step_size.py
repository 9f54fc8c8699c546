"""How much a stale gradient counts, and how stale gradients were.

Staleness is the number of updates between the weights that a gradient was computed with and those that it changes.
"""

from collections import Counter
from typing import Literal


def step_size(staleness: float, rule: Literal["inverse", "constant"]) -> float:
    """The share of the schedule's learning rate that a gradient gets: 1 / staleness from 1 on, or always all of it.

    Source: W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016.

    >>> [step_size(staleness, "inverse") for staleness in (0, 1, 2, 4)]
    [1.0, 1.0, 0.5, 0.25]
    """
    return 1.0 if rule == "constant" else 1.0 / max(1, staleness)


class StalenessCounts:
    """The staleness of every gradient that was applied, each counted once."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, staleness: float) -> None:
        """Count one gradient."""
        self._counts[staleness] += 1

    @property
    def average(self) -> float:
        """0 if there was none."""
        return sum(staleness * count for staleness, count in self._counts.items()) / max(1, self._counts.total())

    @property
    def maximum(self) -> float:
        return max(self._counts, default=0)

    def histogram(self) -> str:
        """Such as `0: 1, 3: 140`: staleness, rounded down, and how many gradients had it."""
        whole: Counter[int] = Counter()
        for staleness, count in self._counts.items():
            whole[int(staleness)] += count
        return ", ".join(f"{staleness}: {count}" for staleness, count in sorted(whole.items()))
