"""Report the first unusable record of each file; readers skip such records and use all others."""

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
    """A record that a reader has skipped because it cannot be used.

    Attributes:
        rank: The rank that wrote the record.
        file: The path of its file, relative to the run's folder.
        line: The line in the file, from 1; None if the file is one record.
        reason: What is wrong with the record, as a clause.
    """

    rank: int
    file: str
    line: int | None
    reason: str


Complain = Callable[[BadLine], None]
"""A function that readers call with every record that cannot be used."""


def pass_over(_: BadLine) -> None:
    """Ignore an unusable record: for readers of a run whose supervisor reports these records."""


def good_records(
    tail: Tail, read: Callable[[bytes], _T | BadRecord], *, rank: int, file: str, complain: Complain = pass_over
) -> Iterator[_T]:
    """Read the usable records in the new lines of a file.

    Args:
        tail: The tail of the file.
        read: The parser of one line.
        rank, file: The rank that wrote the file, and the file's path in the run's folder.
        complain: Called for every line that is no usable record.
    """
    for line in tail.read():
        found = read(line)
        if isinstance(found, BadRecord):
            complain(BadLine(rank, file, tail.lines, found.reason))
        else:
            yield found


def progress_of(folder: Path, rank: int) -> Iterator[AnyProgress]:
    """Read all progress that a rank has reported so far, for any process other than the supervisor."""
    name = contract.progress_file(rank)
    return good_records(Tail(folder / name), read_progress, rank=rank, file=name)


class BadRecords:
    """The first bad record of each file: a rank may write a million of them.

    Several threads may call `add`; one thread calls `fresh`.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], BadLine] = {}
        self._reported = 0

    def add(self, bad: BadLine) -> None:
        self._found.setdefault((bad.rank, bad.file), bad)

    def fresh(self) -> Iterator[BadLine]:
        """Yield the kept records that are new since the last call."""
        found = list(self._found.values())[self._reported :]
        self._reported += len(found)
        yield from found


def report_bad_records(
    bad: BadRecords, rows: Sequence[RankRow], *, folder: RunFolder, output: Callable[[str, bytes], None]
) -> None:
    """Report new bad records on the view's `stderr`, and add them to the run's history."""
    for one in bad.fresh():
        with contextlib.suppress(OSError):  # a full disk is reported by whatever meets it first
            append_event(folder, "bad_record", rank=one.rank, file=one.file, line=one.line, reason=one.reason)
        output("stderr", clean(f"warning[{CODE}]: {message(one, rows)}").encode())


def message(bad: BadLine, rows: Sequence[RankRow]) -> str:
    """Return a sentence that names the rank, the place of its record, and what is wrong with the record."""
    row = rows[bad.rank]
    place = bad.file if bad.line is None else f"line {bad.line} of {bad.file}"
    return f"rank {row.rank} ({row.role}, {row.host}) wrote a record that cannot be used: {place}: {bad.reason}"
