"""What an attendant may send, checked before anything is believed: a host's words must never break the supervisor."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FILE = re.compile(r"(?:logs|records|stacks|blackbox|checkpoints/step-[0-9]{1,18}\.tmp)/rank-[0-9]{1,9}\.[a-z.]+\Z")
_LARGEST = 2**62
_SHOWN = 100


@dataclass(frozen=True)
class FilePiece:
    """A piece of a file in the run's folder.

    Attributes:
        name: Relative to the folder; of a file that a rank has there.
        offset: Of the piece, in bytes.
        whole: Whether the file appears at once, as records do.
        number: Of the piece, from 1, over all connections to the attendant.
    """

    name: str
    offset: int
    whole: bool
    number: int


@dataclass(frozen=True)
class AttendantReady:
    """A connection to the attendant stands.

    Attributes:
        time: The host's, seconds since the epoch.
        clock: The reading of the lease's clock.
        done: How many orders it has carried out.
    """

    time: float
    clock: float
    done: int


@dataclass(frozen=True)
class AttendantAlive:
    """A sign of life.

    Attributes:
        clock: The reading of the lease's clock, to be sent back.
        done: How many orders it has carried out.
    """

    clock: float
    done: int


@dataclass(frozen=True)
class Looked:
    """How the processes of the host's ranks are; all that the attendant had by then has come before.

    Attributes:
        question: Its number.
        stopped: Ranks that were stopped by a signal.
        faults: Ranks, and how often each has touched fresh memory.
    """

    question: int
    stopped: frozenset[int]
    faults: Mapping[int, int]


@dataclass(frozen=True)
class AttendantGone:
    """There is no attendant any more, or it does not want us; `reason` is a clause."""

    reason: str


@dataclass(frozen=True)
class ShimLost:
    """A shim is gone without a record; `time` is the host's, seconds since the epoch."""

    rank: int
    time: float


@dataclass(frozen=True)
class AttendantEnded:
    """The attendant has finished; it had to kill so many processes."""

    killed: int


AttendantFrame = FilePiece | ShimLost | Looked | AttendantReady | AttendantAlive | AttendantGone | AttendantEnded


def parse_attendant_frame(header: Mapping[str, Any]) -> AttendantFrame:
    """What a frame says.

    Raises:
        ValueError: It is none that an attendant of this version sends.
    """
    said = _of_connection(header) or _of_run(header)
    if said is None:
        raise ValueError(f"no message of an attendant: {str(dict(header))[:_SHOWN]}")
    return said


def _of_connection(header: Mapping[str, Any]) -> AttendantFrame | None:
    match header:
        case {"kind": "alive", "clock": clock, "done": done} if _time(clock) and _count(done):
            return AttendantAlive(float(clock), done)
        case {"kind": "ready", "time": time, "clock": clock, "done": done}:
            if _time(time) and _time(clock) and _count(done):
                return AttendantReady(float(time), float(clock), done)
        case {"kind": "gone" | "refused", "reason": str(reason)}:
            return AttendantGone(reason[:_SHOWN])
    return None


def _of_run(header: Mapping[str, Any]) -> AttendantFrame | None:
    match header:
        case {"kind": "file", "name": str(name), "offset": offset, "whole": bool(whole), "number": number}:
            if _FILE.match(name) and _count(offset) and _count(number):
                return FilePiece(name, offset, whole, number)
        case {"kind": "lost_shim", "rank": rank, "time": time} if _count(rank) and _time(time):
            return ShimLost(rank, float(time))
        case {"kind": "looked", "question": question, "stopped": list(stopped), "faults": list(faults)}:
            if _count(question) and all(_count(rank) for rank in stopped) and all(_is_pair(pair) for pair in faults):
                return Looked(question, frozenset(stopped), dict(faults))
        case {"kind": "ended", "killed": killed} if _count(killed):
            return AttendantEnded(killed)
    return None


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_count(part) for part in value)  # noqa: PLR2004 - a pair


def _time(value: object) -> bool:
    return _count(value) or (isinstance(value, float) and math.isfinite(value))
