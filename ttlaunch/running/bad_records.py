"""Records that cannot be used: each file's first one is told once, and all else that the run has written stands."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ttlaunch import contract
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
        line: In the file, from 1; None where the file is one record.
        reason: What is wrong with it, as a clause.
    """

    rank: int
    file: str
    line: int | None
    reason: str


Complain = Callable[[BadLine], None]
"""Told of every record that cannot be used."""


def pass_over(_: BadLine) -> None:
    """For whoever reads a run that somebody else watches or has watched: it was told then."""


def good_records(
    tail: Tail, read: Callable[[bytes], _T | BadRecord], *, rank: int, file: str, complain: Complain = pass_over
) -> Iterator[_T]:
    """The records in the new lines of a file that can be used.

    Args:
        tail: Of the file.
        read: Its parser.
        rank, file: Whose file it is, and where it lies in the run's folder.
        complain: Told of every other line.
    """
    for line in tail.read():
        found = read(line)
        if isinstance(found, BadRecord):
            complain(BadLine(rank, file, tail.lines, found.reason))
        else:
            yield found


def progress_of(folder: Path, rank: int) -> Iterator[AnyProgress]:
    """All that a rank has reported by now, for whoever reads a run that somebody else watches or has watched."""
    name = contract.progress_file(rank)
    return good_records(Tail(folder / name), read_progress, rank=rank, file=name)


class BadRecords:
    """Collects what is wrong; a rank may write a million such lines, and only the first of a file is kept.

    Filled by several threads and emptied by one.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], BadLine] = {}
        self._reported = 0

    def add(self, bad: BadLine) -> None:
        self._found.setdefault((bad.rank, bad.file), bad)

    def fresh(self) -> Iterator[BadLine]:
        """Those that are new since the last call."""
        found = list(self._found.values())[self._reported :]
        self._reported += len(found)
        yield from found


def report_bad_records(
    bad: BadRecords, rows: Sequence[RankRow], *, folder: RunFolder, output: Callable[[str, bytes], None]
) -> None:
    """Say what is new on `stderr` of an output, and note it in the run's history."""
    for one in bad.fresh():
        with contextlib.suppress(OSError):  # a full disk is told of by whoever meets it first
            append_event(folder, "bad_record", rank=one.rank, file=one.file, line=one.line, reason=one.reason)
        output("stderr", f"warning[{CODE}]: {message(one, rows)}".encode())


def message(bad: BadLine, rows: Sequence[RankRow]) -> str:
    """Whose record it is, where it stands, and what is wrong with it."""
    row = rows[bad.rank]
    place = bad.file if bad.line is None else f"line {bad.line} of {bad.file}"
    return f"rank {row.rank} ({row.role}, {row.host}) wrote a record that cannot be used: {place}: {bad.reason}"
