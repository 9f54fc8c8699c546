"""The books that ranks leave of a run: what each sent to whom, how long it waited, and what its steps consisted of."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttlaunch import contract

_STEP = "step"
OUTSIDE_STEPS = frozenset({"start", "after"})
"""Phases that are not part of a step: what comes before the first, and validations between steps."""


@dataclass(frozen=True)
class Sent:
    """Equal steps of one rank: what each of them sent to one other rank.

    Attributes:
        bucket: Which part of a vector; None if it was sent whole.
        first, last, stride: The steps; 0 is what came before the first.
        messages, size: Of each of them; size in bytes.
    """

    operation: str
    bucket: int | None
    phase: str
    dest: int
    first: int
    last: int
    stride: int
    messages: int
    size: int

    def steps_until(self, last: int) -> int:
        """How many of the steps come no later than `last`."""
        return max(0, (min(self.last, last) - self.first) // self.stride + 1)


@dataclass
class Book:
    """What one rank has written.

    Attributes:
        last: The last step it is about.
        facts: What the rank said of itself.
        waits: Microseconds by step, for each operation, within steps.
        phases: Microseconds by step, for each phase of a step.
        steps: Microseconds of each step.
    """

    rank: int
    last: int = 0
    facts: dict[str, int] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    waits: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    phases: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    steps: dict[int, int] = field(default_factory=dict)


def read_books(folder: Path, *, world_size: int) -> list[Book] | None:
    """The books of all ranks, as far as they are written; None if a rank has left none."""
    books = [_read_book(folder / contract.ledger_file(rank), rank) for rank in range(world_size)]
    return None if any(book is None for book in books) else [book for book in books if book is not None]


def measured(books: Sequence[Book], *, until: int) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Messages and bytes by operation, source and destination, of all steps up to one."""
    found: dict[tuple[str, int, int], tuple[int, int]] = {}
    for book in books:
        for row in book.sent:
            steps = row.steps_until(until)
            messages, size = found.get((row.operation, book.rank, row.dest), (0, 0))
            if steps:
                total = (messages + steps * row.messages, size + steps * row.size)
                found[row.operation, book.rank, row.dest] = total
    return found


def _read_book(path: Path, rank: int) -> Book | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    book = Book(rank)
    read = [_fold(book, line) for line in lines]
    return book if any(read) else None


def _fold(book: Book, line: str) -> bool:
    """Take one line into account; one that a killed rank did not finish is passed over."""
    try:
        stretch = json.loads(line)
        if stretch["format"] != contract.LEDGER_FORMAT:
            return False
        _take(book, stretch)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _take(book: Book, stretch: Mapping[str, Any]) -> None:
    book.sent += [
        Sent(operation, bucket, phase, dest, *numbers)
        for operation, bucket, phase, dest, rows in stretch["sent"]
        for numbers in rows
    ]
    book.facts |= stretch["facts"]
    _add_times(book.waits, ((name, times) for name, phase, times in stretch["waited"] if phase not in OUTSIDE_STEPS))
    _add_times(book.phases, ((name, times) for name, times in stretch["spent"] if name not in {*OUTSIDE_STEPS, _STEP}))
    for name, times in stretch["spent"]:
        book.steps |= _by_step(times) if name == _STEP else {}
    book.last = int(stretch["last"])


def _add_times(into: dict[str, dict[int, int]], found: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    for name, times in found:
        known = into[name]
        for step, microseconds in _by_step(times).items():
            known[step] = known.get(step, 0) + microseconds


def _by_step(times: Mapping[str, Any]) -> dict[int, int]:
    return {int(step): int(microseconds) for step, microseconds in times.items()}
