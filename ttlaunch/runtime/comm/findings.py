"""Explain what is wrong with a recipe's messages: who sends or waits for what, at which line, on both sides.

Standard library only: the launching machine's half of `ttlaunch simulate` reads these as JSON.
"""

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttlaunch.runtime.world import Rank

_RUNTIME = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True)
class Place:
    """A line of a recipe."""

    file: str
    line: int


@dataclass(frozen=True)
class Side:
    """One end of a message.

    Attributes:
        what: The tensor's dtype and shape, such as `float32 of shape (3,)`.
        place: The line of the recipe that began this send or receive.
    """

    rank: Rank
    role: str
    is_send: bool
    peer: Rank
    peer_role: str
    tag: int
    what: str
    place: Place

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.role})"

    @property
    def edge(self) -> tuple[Rank, Rank]:
        """The source and the destination of the message."""
        return (self.rank, self.peer) if self.is_send else (self.peer, self.rank)

    def __str__(self) -> str:
        verb, preposition = ("sends", "to") if self.is_send else ("receives", "from")
        return f"{self.name} {verb} {self.what} {preposition} rank {self.peer} ({self.peer_role}), tag {self.tag}"


@dataclass(frozen=True)
class Finding:
    """One mistake in the messages of a world.

    Attributes:
        code: The diagnostic's code, such as `R021`.
        sides: The sends and receives involved, beginning with the one that the user should look at first.
        hint: What the user should type or change.
        notes: Further facts.
    """

    code: str
    message: str
    sides: tuple[Side, ...]
    hint: str
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        sides = [{**asdict(side), "text": str(side)} for side in self.sides]
        return {
            "code": self.code,
            "message": self.message,
            "sides": sides,
            "hint": self.hint,
            "notes": list(self.notes),
        }


def calling_place() -> Place:
    """Return the line outside the runtime that led to a transfer, such as a recipe's call of `RemoteOptimizer`."""
    frame = sys._getframe(1)  # noqa: SLF001  the documented way to find a caller without building a traceback
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_RUNTIME):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


def unfinished_side(sides: Sequence[Side], finished: Collection[Rank]) -> Side:
    """Return which of the transfers that a rank waits for is to be reported: one whose peer has not ended, if there is one."""
    return next((side for side in sides if side.peer not in finished), sides[0])


def find_deadlock(waiting: Mapping[Rank, Side], unmatched: Sequence[Side], finished: frozenset[Rank]) -> Finding:
    """Explain why no rank can continue.

    Args:
        waiting: For each rank that has not ended, the send or receive that it waits for.
        unmatched: Sends that nobody has received.
        finished: Ranks that have ended.
    """
    chain = _chain(waiting)
    last = chain[-1]
    if last.peer in finished:
        message = f"{last.name} waits for rank {last.peer} ({last.peer_role}), which has ended"
    elif len(chain) == 1:
        message = f"{last.name} waits for itself"
    else:
        message = "ranks wait for each other: " + " → ".join(str(side.rank) for side in chain) + f" → {last.peer}"
    notes = [str(side) for side in waiting.values() if side not in chain]
    if len(chain) > 1 and all(side.is_send for side in chain):
        notes.append("all of them send; with small tensors MPI's buffers may hide that, with large ones it hangs")
    hint = "let one of them receive first, or start with `isend` or `irecv` and wait later"
    return Finding("R021", message, tuple(chain), hint, (*notes, *_other_tags(chain, unmatched)))


def find_unmatched(sides: Sequence[Side]) -> list[Finding]:
    """Return a finding for each line of a recipe whose messages had no counterpart when all ranks had ended."""
    found: dict[Place, list[Side]] = {}
    for side in sides:
        found.setdefault(side.place, []).append(side)
    hint = "every `send` needs one `recv`, and every `recv` one `send`, with the same tag"
    return [Finding("R022", _left_over(same), (same[0],), hint) for same in found.values()]


def _left_over(sides: Sequence[Side]) -> str:
    first = sides[0]
    answer = "which no rank receives" if first.is_send else "which no rank sends"
    more = f" ({len(sides)} times)" if len(sides) > 1 else ""
    return f"{first}, {answer}{more}"


def _chain(waiting: Mapping[Rank, Side]) -> list[Side]:
    """Follow who waits for whom from the lowest rank, and return the circle, or else the last rank before the chain ends."""
    rank, seen = min(waiting), []
    while rank in waiting and rank not in seen:
        seen.append(rank)
        rank = waiting[rank].peer
    start = seen.index(rank) if rank in seen else len(seen) - 1
    return [waiting[one] for one in seen[start:]]


def _other_tags(chain: Sequence[Side], unmatched: Sequence[Side]) -> list[str]:
    """Describe, for each waiting receive, the first unreceived message of the same two ranks with another tag."""
    notes = []
    for side in chain:
        others = [send for send in unmatched if not side.is_send and send.edge == side.edge and send.tag != side.tag]
        notes += [f"{others[0]} ({others[0].place.file}:{others[0].place.line})"] if others else []
    return notes
