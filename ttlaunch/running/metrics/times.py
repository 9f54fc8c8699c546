"""Compute from the telemetry how long the phases of steps took, and for how long ranks could only wait."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttlaunch.running.metrics.telemetry import RankTelemetry

_WARM_UP = 1
"""How many first steps are left out if there are more: the first step opens connections and fills caches."""


@dataclass(frozen=True)
class Share:
    """The time that one part of the steps takes, in seconds and as a share.

    Attributes:
        median, p90: The median over steps, and the time that nine steps in ten do not exceed.
        share: The part's time in all steps divided by the time of all steps.
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
        step: The whole steps; a step ends when the rank reports it.
        phases: The phases forward, backward, update, and `exchange`, which is the rest of a step.
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
    """Summarise the steps of some ranks; None if the ranks have finished no step."""
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
    """Return how long some ranks waited for one operation, as `step_times` measures it; None if they did not wait."""
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
    """Return a quantile of sorted values: the smallest value such that at least `part` of the values are not larger."""
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]
