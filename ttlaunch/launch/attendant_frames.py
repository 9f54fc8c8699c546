"""What an attendant may send, checked before anything is believed: a host's words must never break the supervisor."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FILE = re.compile(r"(?:logs|records|stacks|blackbox|checkpoints/step-[0-9]{1,18}\.tmp)/rank-[0-9]{1,9}\.[a-z.]+\Z")
_LARGEST = 2**62


@dataclass(frozen=True)
class FilePiece:
    """A piece of a file in the run's folder.

    Attributes:
        name: Relative to the folder; of a file that a rank has there.
        offset: Of the piece, in bytes.
        whole: Whether the file appears at once, as records do.
    """

    name: str
    offset: int
    whole: bool


@dataclass(frozen=True)
class ShimLost:
    """A shim is gone without a record; `time` is the host's, seconds since the epoch."""

    rank: int
    time: float


@dataclass(frozen=True)
class Looked:
    """How the processes of the host's ranks are; all that the attendant had by then has come before.

    Attributes:
        number: Of the question.
        stopped: Ranks that were stopped by a signal.
        faults: Ranks, and how often each has touched fresh memory.
    """

    number: int
    stopped: frozenset[int]
    faults: Mapping[int, int]


@dataclass(frozen=True)
class AttendantEnded:
    """The attendant has finished; it had to kill so many processes."""

    killed: int


def parse_attendant_frame(header: Mapping[str, Any]) -> FilePiece | ShimLost | Looked | AttendantEnded | None:
    """What a frame says; None if it only says that the attendant is alive.

    Raises:
        ValueError: It is none that an attendant of this version sends.
    """
    match header:
        case {"kind": "alive"}:
            return None
        case {"kind": "file", "name": str(name), "offset": int(offset), "whole": bool(whole)} if _FILE.match(name):
            if 0 <= offset < _LARGEST:
                return FilePiece(name, offset, whole)
        case {"kind": "lost_shim", "rank": int(rank), "time": int() | float() as time} if math.isfinite(time):
            return ShimLost(rank, float(time))
        case {"kind": "looked", "number": int(number), "stopped": list(stopped), "faults": list(faults)}:
            if all(_is_rank(rank) for rank in stopped) and all(_is_pair(pair) for pair in faults):
                return Looked(number, frozenset(stopped), dict(faults))
        case {"kind": "ended", "killed": int(killed)}:
            return AttendantEnded(killed)
    raise ValueError(f"no message of an attendant: {str(dict(header))[:100]}")


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < _LARGEST


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_rank(part) for part in value)  # noqa: PLR2004 - a pair
