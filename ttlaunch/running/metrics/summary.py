"""Every number of a log in a line: how often it was measured, its first and last value, its least and its most."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ttlaunch.running.metrics.event_log import Event
from ttlaunch.running.metrics.names import metrics_of


@dataclass
class Summary:
    """One metric of one rank."""

    name: str
    rank: int
    count: int
    first: float
    last: float
    least: float
    most: float

    @property
    def values(self) -> tuple[float, float, float, float]:
        return self.first, self.last, self.least, self.most


def summarise(events: Iterable[Event]) -> list[Summary]:
    """By name, then by rank; what is not a number counts as measured and is never the least or the most."""
    found: dict[tuple[str, int], Summary] = {}
    for event in events:
        if event.rank is None:
            continue
        for name, value in metrics_of(event).items():
            known = found.setdefault((name, event.rank), Summary(name, event.rank, 0, value, value, value, value))
            known.count += 1
            known.last = value
            known.least = value if math.isnan(known.least) else min(known.least, value)
            known.most = value if math.isnan(known.most) else max(known.most, value)
    return [found[key] for key in sorted(found)]
