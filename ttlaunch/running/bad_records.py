"""Report records that cannot be used, once for each file; everything else that the run has written is used."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ttlaunch import contract
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.parser import BadRecord
from ttlaunch.records.ranks import AnyProgress, read_progress
from ttlaunch.running.runs.files import Tail
from ttlaunch.running.runs.run_folder import RunFolder, append_event

CODE = "R063"
_T = TypeVar("_T")


@dataclass(frozen=True)
class BadLine:
    """A record that was passed over.

    Attributes:
        file: Relative to the run's folder.
        line: The line in the file, from 1; None if the file is one record.
        reason: What is wrong with it, as a clause.
    """

    rank: int
    file: str
    line: int | None
    reason: str


Complain = Callable[[BadLine], None]
"""Told of every record that cannot be used."""


def pass_over(_: BadLine) -> None:
    """Report nothing: for readers of a run whose supervisor reports such records."""


def good_records(
    tail: Tail, read: Callable[[bytes], _T | BadRecord], *, rank: int, file: str, complain: Complain = pass_over
) -> Iterator[_T]:
    """Read the usable records in the new lines of a file.

    Args:
        tail: The tail of the file.
        read: Its parser.
        rank, file: The rank that wrote the file, and its path in the run's folder.
        complain: Called for every other line.
    """
    for line in tail.read():
        found = read(line)
        if isinstance(found, BadRecord):
            complain(BadLine(rank, file, tail.lines, found.reason))
        else:
            yield found


def progress_of(folder: Path, rank: int) -> Iterator[AnyProgress]:
    """All progress that a rank has reported by now, for readers beside or after the supervisor."""
    name = contract.progress_file(rank)
    return good_records(Tail(folder / name), read_progress, rank=rank, file=name)


class BadRecords:
    """Collects bad records; a rank may write a million of them, so only the first one of a file is kept.

    Several threads add records, and one takes them.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], BadLine] = {}
        self._reported = 0

    def add(self, bad: BadLine) -> None:
        self._found.setdefault((bad.rank, bad.file), bad)

    def fresh(self) -> Iterator[BadLine]:
        """The records that were added since the last call."""
        found = list(self._found.values())[self._reported :]
        self._reported += len(found)
        yield from found


def report_bad_records(
    bad: BadRecords, rows: Sequence[RankRow], *, folder: RunFolder, output: Callable[[str, bytes], None]
) -> None:
    """Report new bad records on `stderr` of an output, and note them in the run's history."""
    for one in bad.fresh():
        with contextlib.suppress(OSError):  # a full disk is reported by whatever meets it first
            append_event(folder, "bad_record", rank=one.rank, file=one.file, line=one.line, reason=one.reason)
        output("stderr", clean(f"warning[{CODE}]: {message(one, rows)}").encode())


def message(bad: BadLine, rows: Sequence[RankRow]) -> str:
    """A sentence with the rank, the place of the record, and what is wrong with it."""
    row = rows[bad.rank]
    place = bad.file if bad.line is None else f"line {bad.line} of {bad.file}"
    return f"rank {row.rank} ({row.role}, {row.host}) wrote a record that cannot be used: {place}: {bad.reason}"
