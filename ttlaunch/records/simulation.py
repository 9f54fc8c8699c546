"""The result that a simulation's process writes at its end: `simulation.json`.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

from ttlaunch.records.parser import Count, Flag, Rank, Size, Tag, Text, Word, record

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any


@record
class SimulatedEdge:
    """Messages and bytes from one rank to another."""

    source: Rank
    dest: Rank
    messages: Count
    bytes: Size


@record
class SidePlace:
    """A place in a recipe's source."""

    file: Word
    line: Count


@record
class FindingSide:
    """One end of a message that is part of a mistake: the send or the receive; `text` describes it completely."""

    rank: Rank
    role: Word
    is_send: Flag
    peer: Tag
    peer_role: Word
    tag: Tag
    what: Text
    place: SidePlace
    text: Text


@record
class SimulatedFinding:
    """One mistake in the messages, see `runtime/comm/findings.py`."""

    code: Word
    message: Text
    sides: tuple[FindingSide, ...]
    hint: Text
    notes: tuple[Text, ...]


@record
class SimulationEnd:
    """The findings of a simulation, its traffic, and the peak of its memory."""

    findings: tuple[SimulatedFinding, ...]
    edges: tuple[SimulatedEdge, ...]
    peak_memory_bytes: Size | None


def as_json(value: object) -> Any:
    """Convert a record of this module back to the JSON from which it was read."""
    if isinstance(value, (list, tuple)):
        return [as_json(one) for one in value]
    if isinstance(value, (SimulatedEdge, SidePlace, FindingSide, SimulatedFinding)):
        return {name: as_json(one) for name, one in vars(value).items()}
    return value
