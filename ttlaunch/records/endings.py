"""The records of how a rank ended, which are written once: its exception, its exit, shards of its checkpoints, notes of its output.

Each record is a class whose annotations are the kinds of `parser.py`. Python 3.9 and the standard library only.
"""

from __future__ import annotations

from ttlaunch.records.parser import (
    BadRecord,
    Count,
    Flag,
    Json,
    Pid,
    Rank,
    Signal,
    Size,
    Status,
    Step,
    Text,
    Time,
    Word,
    parse,
    record,
    shown,
)

_LONGEST_NOTE = 100


@record
class ErrorCause:
    """One exception of a chain: the one that ended the rank comes first, then those that led to it.

    Attributes:
        origin: Which code raised it, see `rank_exceptions/describe.py`; empty for any code that exchanges no messages.
    """

    type: Word
    message: Text = ""
    origin: Word = ""


@record
class RankError:
    """`records/rank-N.error.json`: the exception that a rank's role raised; `file` and `line` are its place.

    Attributes:
        module: The module of the exception's type.
        notes: What `add_note` added to the exception.
        causes: The exception and those that led to it; None in records of older versions.
        broken: The other ends of the rank's connections that were broken, see `rank_exceptions/describe.py`.
        seen: When the exception was first seen in flight, if that was before it ended the rank.
    """

    type: Word = "None"
    module: Word = ""
    message: Text = ""
    notes: tuple[Text, ...] = ()
    causes: tuple[ErrorCause, ...] | None = None
    broken: tuple[Word, ...] = ()
    traceback: Text = ""
    file: Word | None = None
    line: Count | None = None
    step: Step | None = None
    role: Word = ""
    seen: Time | None = None
    time: Time = 0.0

    @property
    def began(self) -> float:
        """When the rank began to fail."""
        return self.time if self.seen is None else min(self.seen, self.time)


@record
class ErrorInFlight:
    """A line of `records/rank-N.exceptions.jsonl`: an exception that ended the rank, or that will unless the rank goes on after all.

    Attributes:
        error: The exception; None if the rank has gone on after the one of the line before.
        uncaught: Whether nothing in the rank caught it; else it was still cleaning up when the line was written.
        is_certain: Whether it was clear when the line was written that nothing in the rank would catch it.
        left: When all code of a program's rank had run, after `error` or without one; only its libraries then end.
        status: The exit status that the process is to have when these have ended; None if that is not known.
    """

    error: RankError | None
    uncaught: Flag = False
    is_certain: Flag = True
    left: Time | None = None
    status: Status | None = None


_NO_OUTPUT: dict[str, int] = {}


@record
class RankExit:
    """`records/rank-N.exit.json`: how a rank ended, as its shim recorded it.

    Attributes:
        status, signal: The exit status, or the signal that killed the rank; both are None if it could not be started.
        left_early: Whether the rank exited with status 0 before its role was finished.
        oom_kills: How many processes the kernel has killed for lack of memory in this time; None if it does not report this.
        left_behind: How many processes of the rank the shim had to end.
        unkept_output: How many bytes of each stream could not be written, because of `unkept_reason`.
    """

    rank: Rank | None = None
    pid: Pid | None = None
    started: Time | None = None
    time: Time = 0.0
    status: Status | None = None
    signal: Signal | None = None
    left_early: Flag = False
    peak_memory_bytes: Size | None = None
    oom_kills: Count | None = None
    memory_limit_bytes: Size | None = None
    left_behind: Count = 0
    unkept_output: dict[str, Size] = _NO_OUTPUT
    unkept_reason: Text | None = None
    start_error: Text | None = None

    @property
    def is_failure(self) -> bool:
        """Whether the rank did anything other than finish its role and exit with status 0."""
        return self.status != 0 or self.left_early or bool(self.start_error)


@record
class ShardRecord:
    """`rank-N.json` beside a shard of a checkpoint: the shard's size and digest; `state` is the state of training."""

    owners: tuple[Rank, ...]
    state: dict[str, Json]
    size: Size
    sha256: Word
    tensors: tuple[Word, ...]


@record
class OutputNote:
    """A line of `logs/rank-N.times`: the length of a stream's file at a time, and whether the stream had ended."""

    time: Time
    stream: Word
    end: Size
    is_over: Flag


def read_output_note(line: bytes) -> OutputNote | BadRecord:
    """Parse a line of `logs/rank-N.times`: time, stream 1 or 2, length of its file, and perhaps `end`."""
    parts = line.split()
    if len(line) > _LONGEST_NOTE or len(parts) not in (3, 4) or parts[1] not in (b"1", b"2"):
        return BadRecord(f"it is {shown(line)}, expected a time, 1 or 2, and a length")
    try:
        time, end = float(parts[0]), int(parts[2])
    except ValueError:
        return BadRecord(f"it is {shown(line)}, expected a time, 1 or 2, and a length")
    known = {"time": time, "stream": "stdout" if parts[1] == b"1" else "stderr", "end": end}
    return parse(OutputNote, {**known, "is_over": parts[3:] == [b"end"]})
