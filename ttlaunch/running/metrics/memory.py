"""What the tensors of each rank took in the step that showed it, as its books have it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ttlaunch.running.metrics.books import Book

KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")
"""What tensors are for, as a rank tells them apart; see `ttlaunch/runtime/telemetry/memory.py`."""


@dataclass(frozen=True)
class RankMemory:
    """One rank's.

    Attributes:
        step: In which it was counted.
        sizes: The most bytes of each kind at any moment of the step.
        peak: The most bytes of all together at one moment; at most the sum of the sizes.
    """

    rank: int
    step: int
    sizes: dict[str, int]
    peak: int

    def as_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "step": self.step, "sizes": self.sizes, "peak": self.peak}


def memory_of_ranks(books: Sequence[Book]) -> list[RankMemory]:
    """Of the ranks that counted it, in order; none unless the run was asked for it."""
    return [
        RankMemory(
            book.rank,
            book.facts["memory_step"],
            {kind: book.facts[f"memory_{kind}"] for kind in KINDS},
            book.facts["memory_peak"],
        )
        for book in books
        if {"memory_step", "memory_peak", *(f"memory_{kind}" for kind in KINDS)} <= book.facts.keys()
    ]
