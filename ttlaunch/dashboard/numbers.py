"""The numbers of a run by name and rank, as `ttlaunch metrics` names them, and their reduction to what a screen can show."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from ttlaunch.running.metrics.event_log import Column, Event
from ttlaunch.running.metrics.names import metrics_of

MOST_POINTS: Final = 2000
"""How many points of a rank a chart gets at most."""
MOST_NAMES: Final = 4096


class Point(NamedTuple):
    """A number that a rank measured at a step."""

    name: str
    rank: int
    step: int
    time: float
    value: float


class Series:
    """One number of one rank over the steps, in the order in which it was measured; 24 bytes a point."""

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("q"), array("d"), array("d")

    def add(self, point: Point) -> None:
        """Add a point."""
        self.steps.append(point.step)
        self.times.append(point.time)
        self.values.append(point.value)

    def extend(self, newer: "Series | Column") -> None:
        """Add the points of another series, or of a column."""
        self.steps.extend(newer.steps)
        self.times.extend(newer.times)
        self.values.extend(newer.values)

    def between(self, first: int | None, last: int | None) -> range:
        """Return the positions of the points from one step to another; steps are taken to grow, as they do without a restart."""
        begin = 0 if first is None else bisect_left(self.steps, first)
        return range(begin, len(self.steps) if last is None else bisect_right(self.steps, last))


class Stored(Protocol):
    """The numbers of the first part of a long run, which are read from a file when somebody asks for them."""

    @property
    def names(self) -> Mapping[str, Mapping[int, object]]:
        """What there is, by name and rank."""

    def read(self, name: str, rank: int, *, first: int | None, last: int | None) -> Series:
        """Read all points of a series between two steps, and maybe further ones."""


class Numbers:
    """All numbers of a run: those in memory, and before them those that were stored."""

    def __init__(self, stored: Stored | None = None) -> None:
        self._series: dict[str, dict[int, Series]] = {}
        self._stored = stored

    @property
    def names(self) -> dict[str, list[int]]:
        """Return the ranks that measured each number, by name."""
        before = self._stored.names if self._stored else {}
        every = sorted(self._series.keys() | before.keys())
        return {name: sorted({*self._series.get(name, ()), *before.get(name, ())}) for name in every}

    def add(self, events: Iterable[Event]) -> list[Point]:
        """Add the numbers of some events and return them; a script that invents names without end gets no further ones."""
        found = [point for event in events for point in points_of(event)]
        for point in found:
            if point.name in self._series or len(self._series) < MOST_NAMES:
                self._series.setdefault(point.name, {}).setdefault(point.rank, Series()).add(point)
        return found

    def add_columns(self, found: Iterable[Event | Column]) -> None:
        """Add the numbers of some events and columns of ranks, for which a fifth of the time is needed."""
        for one in found:
            if not isinstance(one, Column):
                self.add([one])
            elif one.name in self._series or len(self._series) < MOST_NAMES:
                series = self._series.setdefault(one.name, {}).setdefault(one.rank, Series())
                series.extend(one)

    def of(self, name: str, *, first: int | None = None, last: int | None = None) -> Iterator[tuple[int, Series]]:
        """Yield a number's series by rank, with all points between two steps at least; one at a time is in memory."""
        for rank in self.names.get(name, ()):
            newer = self._series.get(name, {}).get(rank, Series())
            series = self._stored.read(name, rank, first=first, last=last) if self._stored else Series()
            series.extend(newer)
            yield rank, series

    @property
    def count(self) -> int:
        """How many points are in memory."""
        return sum(len(one.steps) for ranks in self._series.values() for one in ranks.values())


def points_of(event: Event) -> Iterator[Point]:
    """Yield the numbers of an event of a rank."""
    if event.rank is not None:
        for name, value in metrics_of(event).items():
            yield Point(name, event.rank, event.step or 0, event.time, value)


def thin(values: "array[float]", among: range, *, most: int) -> list[int]:
    """Choose positions such that a line through them looks as one through all: the least and the largest value of each part.

    Args:
        values: All values.
        among: The positions to choose from.
        most: How many positions may be chosen, at least 4.
    """
    if len(among) <= most:
        return list(among)
    parts = (most - 2) // 2
    chosen = {among[0], among[-1]}
    for part in range(parts):
        positions = among[part * len(among) // parts : (part + 1) * len(among) // parts]
        some = values[positions.start : positions.stop]
        if any(map(math.isnan, some)):
            known = [at for at in positions if not math.isnan(values[at])] or positions[:1]
            chosen |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
        else:
            chosen |= {positions.start + some.index(extreme) for extreme in (min(some), max(some))}
    return sorted(chosen)


def series_as_json(series: Series, *, first: int | None, last: int | None, most: int) -> dict[str, object]:
    """Return a series between two steps, reduced to `most` points; numbers that JSON cannot express are texts."""
    among = series.between(first, last)
    chosen = thin(series.values, among, most=max(4, min(most, MOST_POINTS)))
    return {
        "steps": [series.steps[at] for at in chosen],
        "times": [series.times[at] for at in chosen],
        "values": [number(series.values[at]) for at in chosen],
        "points": len(among),
    }


def number(value: float) -> float | str:
    """Return a number as JSON can express it."""
    return value if math.isfinite(value) else str(value)


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot express by texts, in what JSON is made of."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value
