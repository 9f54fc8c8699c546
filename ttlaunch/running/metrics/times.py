"""Compute from the telemetry how long the phases of a run's steps took, and how long ranks only waited."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttlaunch.running.metrics.telemetry import RankTelemetry

_WARM_UP = 1
"""How many first steps are left out, if more were made: they open connections and fill caches."""


@dataclass(frozen=True)
class Share:
    """How much of the steps' time one part takes, in seconds.

    Attributes:
        median, p90: The median over steps, and the time that nine steps in ten do not exceed.
        share: The share of the time of all steps.
    """

    name: str
    median: float
    p90: float
    share: float

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "median_s": self.median, "p90_s": self.p90, "share": self.share}


@dataclass(frozen=True)
class StepTimes:
    """The parts of the steps of some ranks.

    Attributes:
        ranks: The ranks that the steps belong to.
        step: Whole steps, each up to its report.
        phases: Forward, backward, update, and `exchange`, which is the rest.
        waits: For each operation, the time in which the rank could only wait for messages to leave or to arrive. It is
            also part of the phase in which the rank waited.
    """

    ranks: tuple[int, ...]
    step: Share
    phases: tuple[Share, ...]
    waits: tuple[Share, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks": list(self.ranks),
            "step": self.step.as_json(),
            "phases": [share.as_json() for share in self.phases],
            "exposed": [share.as_json() for share in self.waits],
        }


def step_times(telemetry: Sequence[RankTelemetry]) -> StepTimes | None:
    """Summarise the steps of some ranks; None if they have finished none."""
    numbers = [sorted(entry.steps)[_WARM_UP:] or sorted(entry.steps) for entry in telemetry]
    steps = [[entry.steps[step] for step in known] for entry, known in zip(telemetry, numbers, strict=True)]
    if not any(steps):
        return None
    whole = sum(map(sum, steps))
    phases = _shares(((entry.phases, known) for entry, known in zip(telemetry, numbers, strict=True)), whole)
    waits = _shares(((entry.waits, known) for entry, known in zip(telemetry, numbers, strict=True)), whole)
    step = _share("step", [microseconds for one in steps for microseconds in one], whole)
    return StepTimes(tuple(entry.rank for entry in telemetry), step, phases, waits)


def share_of(operation: str, telemetry: Sequence[RankTelemetry]) -> Share | None:
    """Return how long some ranks waited for one operation; None if they did not wait. See `step_times`."""
    times = step_times(telemetry)
    return None if times is None else next((wait for wait in times.waits if wait.name == operation), None)


def _shares(found: Iterable[tuple[Mapping[str, Mapping[int, int]], Sequence[int]]], whole: int) -> tuple[Share, ...]:
    values: dict[str, list[int]] = defaultdict(list)
    for by_name, steps in found:
        for name, times in by_name.items():
            values[name] += [times.get(step, 0) for step in steps]
    shares = [_share(name, one, whole) for name, one in values.items() if any(one)]
    return tuple(sorted(shares, key=lambda share: -share.share))


def _share(name: str, microseconds: Sequence[int], whole: int) -> Share:
    ordered = sorted(microseconds)
    return Share(
        name, _quantile(ordered, 0.5) / 1e6, _quantile(ordered, 0.9) / 1e6, sum(ordered) / whole if whole else 0.0
    )


def _quantile(ordered: Sequence[int], part: float) -> int:
    """Return a quantile by the nearest rank: the smallest value that is at least as large as this part of the values."""
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]
