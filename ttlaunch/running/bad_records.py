"""Records that cannot be used: each file's first one is told once, and all else that the run has written stands."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.runs.run_folder import RunFolder, append_event

CODE = "R063"


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


class BadRecords:
    """Collects what is wrong; a rank may write a million such lines, and only the first of a file is kept.

    Filled by several threads and emptied by one.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], BadLine] = {}
        self._told = 0

    def add(self, bad: BadLine) -> None:
        self._found.setdefault((bad.rank, bad.file), bad)

    def fresh(self) -> Iterator[BadLine]:
        """Those that are new since the last call."""
        found = list(self._found.values())[self._told :]
        self._told += len(found)
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
