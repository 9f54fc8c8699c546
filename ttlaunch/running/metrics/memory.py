"""What the tensors of each rank took in the step that showed it, as its telemetry have it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ttlaunch.running.metrics.telemetry import RankTelemetry

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
        return dict(vars(self))


def memory_of_ranks(telemetry: Sequence[RankTelemetry]) -> list[RankMemory]:
    """Of the ranks that counted it, in order; none unless the run was asked for it."""
    return [
        RankMemory(
            entry.rank,
            entry.facts["memory_step"],
            {kind: entry.facts[f"memory_{kind}"] for kind in KINDS},
            entry.facts["memory_peak"],
        )
        for entry in telemetry
        if {"memory_step", "memory_peak", *(f"memory_{kind}" for kind in KINDS)} <= entry.facts.keys()
    ]
