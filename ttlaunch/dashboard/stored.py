"""The numbers of a long run in a file of blocks: each has the points of one number of one rank, so that a chart reads its own."""

import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch.dashboard.numbers import MOST_NAMES, Series
from ttlaunch.records.regular_files import open_regular
from ttlaunch.running.metrics.event_log import Column, Event
from ttlaunch.running.metrics.names import metrics_of

_HELD_POINTS = 400_000
"""How many points are in memory before they are written, at 24 bytes each."""


@dataclass(frozen=True)
class Block:
    """Some points of a series: where they are, how many, and their first and last step."""

    offset: int
    count: int
    first: int
    last: int


class PointsWriter:
    """Writes points, some hundred thousand at a time; a block is all steps, then all times, then all values."""

    def __init__(self, path: Path) -> None:
        """Begin an empty file.

        Raises:
            OSError: The file cannot be written.
        """
        self.path = path
        self._file = path.open("wb")
        self._held: dict[int, dict[str, Series]] = {}
        self._blocks: dict[tuple[str, int], list[Block]] = {}
        self._names: set[str] = set()
        self._count = 0

    def add(self, event: Event) -> None:
        """Add the numbers of an event of a rank; as in `Numbers`, names beyond a limit are left out."""
        assert event.rank is not None  # noqa: S101 - the caller's events are those of ranks
        held = self._held.setdefault(event.rank, {})
        step, time = event.step or 0, event.time
        for name, value in metrics_of(event).items():
            series = held.get(name)
            if series is None:
                if name not in self._names and len(self._names) >= MOST_NAMES:
                    continue
                self._names.add(name)
                series = held[name] = Series()
            series.steps.append(step)
            series.times.append(time)
            series.values.append(value)
            self._count += 1
        if self._count >= _HELD_POINTS:
            self._flush()

    def add_column(self, column: Column) -> None:
        """Add a number of a rank over some steps."""
        held = self._held.setdefault(column.rank, {})
        series = held.get(column.name)
        if series is None:
            if column.name not in self._names and len(self._names) >= MOST_NAMES:
                return
            self._names.add(column.name)
            series = held[column.name] = Series()
        series.extend(column)
        self._count += len(column.steps)
        if self._count >= _HELD_POINTS:
            self._flush()

    def finish(self) -> list[list[Any]]:
        """Write the rest, and return the blocks as rows of JSON: name, rank, and the blocks' fields."""
        self._flush()
        self._file.close()
        return [
            [name, rank, [[one.offset, one.count, one.first, one.last] for one in blocks]]
            for (name, rank), blocks in self._blocks.items()
        ]

    def _flush(self) -> None:
        for rank, named in self._held.items():
            for name, series in named.items():
                block = Block(self._file.tell(), len(series.steps), min(series.steps), max(series.steps))
                self._blocks.setdefault((name, rank), []).append(block)
                for column in (series.steps, series.times, series.values):
                    column.tofile(self._file)
        self._held.clear()
        self._count = 0


class StoredPoints:
    """Reads what `PointsWriter` has written; nothing of it stays in memory."""

    def __init__(self, folder: Path, files: Sequence[Sequence[Any]]) -> None:
        """Begin to read.

        Args:
            folder: The folder of the files.
            files: For each file its name and what `finish` returned; no series is in two of them.
        """
        self._blocks: dict[str, dict[int, list[Block]]] = {}
        self._paths: dict[int, Path] = {}
        for file, rows in files:
            for name, rank, blocks in rows:
                self._blocks.setdefault(str(name), {})[int(rank)] = [Block(*map(int, one)) for one in blocks]
                self._paths[int(rank)] = folder / str(file)

    @property
    def names(self) -> Mapping[str, Mapping[int, Sequence[Block]]]:
        """The blocks by name and rank."""
        return self._blocks

    def read(self, name: str, rank: int, *, first: int | None, last: int | None) -> Series:
        """Read the points of a series in all blocks that have steps between two."""
        series = Series()
        blocks = self._blocks.get(name, {}).get(rank, ())
        wanted = [one for one in blocks if (first is None or one.last >= first) and (last is None or one.first <= last)]
        if wanted:
            with open_regular(self._paths[rank]) as file:
                for block in wanted:
                    at = block.offset
                    for column in (series.steps, series.times, series.values):
                        column.extend(_column(file.fileno(), at, block.count, kind=column.typecode))
                        at += block.count * column.itemsize
        return series


def _column(descriptor: int, offset: int, count: int, *, kind: str) -> "array[Any]":
    column = array(kind)
    data = os.pread(descriptor, count * column.itemsize, offset)
    column.frombytes(data[: len(data) // column.itemsize * column.itemsize])
    return column
