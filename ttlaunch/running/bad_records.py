"""Report the first unusable record of each file; readers skip such records and use all others.

Of a file with `MOST_BAD_LINES` such records, readers skip the rest, and that is reported too.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from ttlaunch import contract
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.parser import BadRecord
from ttlaunch.records.ranks import AnyProgress, read_progress
from ttlaunch.records.steps import Steps, read_together
from ttlaunch.running.runs.files import Tail
from ttlaunch.running.runs.run_folder import RunFolder, append_event

CODE = "R063"
MOST_BAD_LINES = 10_000
"""After so many bad lines, the rest of a file is passed over: a rank could write millions, which cost time to look at."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class BadLine:
    """A record that a reader has skipped because it cannot be used.

    Attributes:
        rank: The rank that wrote the record.
        file: The path of its file, relative to the run's folder.
        line: The line in the file, from 1; None if the file is one record.
        reason: What is wrong with the record, as a clause.
        is_last: Whether the reader skips the rest of the file.
    """

    rank: int
    file: str
    line: int | None
    reason: str
    is_last: bool = False


Complain = Callable[[BadLine], None]
"""A function that readers call with every record that cannot be used."""


def pass_over(_: BadLine) -> None:
    """Ignore an unusable record: for readers of a run whose supervisor reports these records."""


def good_records(
    tail: Tail,
    read: Callable[[bytes], _T | BadRecord],
    *,
    rank: int,
    file: str,
    complain: Complain = pass_over,
    most: int | None = None,
) -> Iterator[_T]:
    """Read the usable records in the new lines of a file.

    Args:
        tail: The tail of the file.
        read: The parser of one line.
        rank, file: The rank that wrote the file, and the file's path in the run's folder.
        complain: Called for every line that is no usable record, and once more if the rest of the file is skipped.
        most: How many bytes to read now at most; None: all that is new.
    """
    return _good(map(read, tail.read(most=most)), tail, rank=rank, file=file, complain=complain)


def good_progress(tail: Tail, *, rank: int, file: str, complain: Complain = pass_over) -> Iterator[Steps | AnyProgress]:
    """Read a rank's progress as `good_records` does, but steps that have the same numbers together."""
    return _good(read_together(tail.read()), tail, rank=rank, file=file, complain=complain)


def _good(records: Iterable[_T | BadRecord], tail: Tail, *, rank: int, file: str, complain: Complain) -> Iterator[_T]:
    """Yield the usable ones of the records of a tail's lines, which are read one after the other."""
    for found in records:
        if not isinstance(found, BadRecord):
            yield found
            continue
        complain(BadLine(rank, file, tail.lines, found.reason))
        tail.bad_lines += 1
        if tail.bad_lines >= MOST_BAD_LINES:
            tail.is_given_up = True
            reason = f"it is the {MOST_BAD_LINES:,}th such line, so the rest of the file is passed over"
            complain(BadLine(rank, file, tail.lines, reason, is_last=True))
            return


def progress_of(folder: Path, rank: int) -> Iterator[AnyProgress]:
    """Read all progress that a rank has reported so far, for any process other than the supervisor."""
    name = contract.progress_file(rank)
    return good_records(Tail(folder / name), read_progress, rank=rank, file=name)


class BadRecords:
    """The first bad record of each file, and the one after which the rest is skipped: a rank may write a million of them.

    Several threads may call `add`; one thread calls `fresh`.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, bool], BadLine] = {}
        self._reported = 0

    def add(self, bad: BadLine) -> None:
        self._found.setdefault((bad.rank, bad.file, bad.is_last), bad)

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
