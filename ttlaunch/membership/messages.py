"""What the coordinator and the workers of an elastic run send each other.

A worker keeps its *number* for life; a process that takes the place of one that ended has the same number and the next
*incarnation*. An *epoch* is a period in which the same members take part. A member's rank in an epoch is its *place* among
the members.

M = micro-batches of a step, the leaves of the tree of `spec/recipe/blocks.py`. Leaves are given as pairs (first, one past the last).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from ttlaunch.records.parser import BadRecord, Count, Flag, Rank, Seconds, Step, Word, let_parse, read

_MOST_SLOTS = 4096


@dataclass(frozen=True, order=True)
class Member:
    """One process that takes part, or could."""

    number: Rank
    incarnation: Count


@dataclass(frozen=True)
class Seat:
    """A member of an epoch, and where the others reach it.

    Attributes:
        host: The name of its host; members with equal names share a file system.
        address: `address:port` for members on other hosts; None if there are none.
    """

    member: Member
    host: Word = ""
    address: Word | None = None


@dataclass(frozen=True)
class Share:
    """The part of a run's state that a member has; see `slots.py`.

    Attributes:
        cut: Into how many slots the state is cut.
        slots: Those that the member has, each a number below `cut`.
    """

    cut: Count
    slots: tuple[Count, ...] = ()

    @property
    def is_possible(self) -> bool:
        """Whether there are such slots; what another process says may be anything."""
        return (
            0 < self.cut <= _MOST_SLOTS and len(self.slots) <= self.cut and all(slot < self.cut for slot in self.slots)
        )


# What workers report


@dataclass(frozen=True)
class Registered:
    """A worker is ready to take part.

    Attributes:
        seat: Who it is and where it listens.
        applied: The last step in its weights and optimizer; None if it has no state and must get one from others.
        follows: Whether it gets the state from the members while they go on, and reports it, before it takes part; see `Follow`.
    """

    seat: Seat
    applied: Step | None
    follows: Flag = False


@dataclass(frozen=True)
class Answered:
    """A member has stopped for an epoch that is to begin.

    Attributes:
        epoch: That of the `Prepare` which it answers.
        applied: As in `Registered`.
        held: The nodes of the tree that it has of step `applied` + 1, each a power of two of leaves, in order.
        validated: The last step whose validation it has finished; equal to `applied` where none was due.
        is_done: Whether it has made the last step of the run.
        shares: What it has of the state of step `applied`: empty if it has all of it, or none. After the begin of an epoch these are
            its slots of the former cut and, once it has got them, those of the new one. The former ones are kept until all
            members have got theirs, which a member knows when it has its whole gradient of the epoch's first step.
        is_ready: Whether it has the mean gradient of its slots for step `applied` + 1, so that it can make that step when it learns
            what is the same on all members, such as the gradient's norm.
    """

    member: Member
    epoch: Count
    applied: Step | None
    held: tuple[tuple[Count, Count], ...] = ()
    validated: Step | None = None
    is_done: bool = False
    shares: tuple[Share, ...] = ()
    is_ready: bool = False


@dataclass(frozen=True)
class Progressed:
    """A member acts in an epoch and has made some progress.

    Attributes:
        pace_s: Seconds that it needs for a micro-batch; None as long as it does not know.
        is_done: Whether it has made the last step of the run, and done in this epoch what follows it.
    """

    member: Member
    epoch: Count
    applied: Step
    pace_s: Seconds | None = None
    is_done: bool = False


@dataclass(frozen=True)
class CutOff:
    """A member cannot go on in an epoch: it has lost its connection to another member, and nobody has ended.

    Attributes:
        applied: As in `Registered`.
    """

    member: Member
    epoch: Count
    applied: Step | None


@dataclass(frozen=True)
class Lost:
    """A worker's process has ended, or it is to be treated so."""

    member: Member


@dataclass(frozen=True)
class LeaveAsked:
    """Somebody wants this worker to leave at the next boundary of a step."""

    number: Rank


@dataclass(frozen=True)
class EndOrdered:
    """The whole run was ordered to stop: nobody comes any more, and those who are left end it together, however few they are."""


@dataclass(frozen=True)
class Tick:
    """Some time has passed: repeat orders that may have been lost, and look whether work should be divided anew."""


Event = Registered | Answered | Progressed | CutOff | Lost | LeaveAsked | EndOrdered | Tick


# What the coordinator orders


@dataclass(frozen=True)
class Prepare:
    """Stop at once, keep what you have, and answer."""

    epoch: Count


@dataclass(frozen=True)
class Begin:
    """The members of an epoch, and how they make its steps.

    Attributes:
        epoch: The epoch that begins.
        seats: The members in the order of their places: sorted by number, but servers, if the run has any, come first.
        applied: The step that all start from, which is the largest that any member has applied.
        kept: For each member, the nodes of step `applied` + 1 that it has and that count.
        todo: For each member, the leaves of that step which it computes anew. With `kept`, every leaf is there exactly once.
        blocks: For each member, its leaves of all later steps of the epoch.
        behind: The members that lack `applied`, each with the last step that it has applied, or None.
        holders: The members that have applied it, and give what the others lack.
        validates: Whether the validation after `applied` has to be done, by all members together.
        shares: Where the state is cut into slots, what each member has of it, all of one cut; a member that lacks `applied` but is
            ready for it counts as if it had made it. None for a member that has all of it. Empty where it is not cut.
        earlier: Where workers take steps of their own, the epochs that still count of those before this one; see `local_epochs.py`.
    """

    epoch: Count
    seats: tuple[Seat, ...]
    applied: Step
    kept: tuple[tuple[tuple[Count, Count], ...], ...]
    todo: tuple[tuple[tuple[Count, Count], ...], ...]
    blocks: tuple[tuple[Count, Count], ...]
    behind: tuple[tuple[Rank, Step | None], ...]
    holders: tuple[Rank, ...]
    validates: Flag
    shares: tuple[Share | None, ...] = ()
    earlier: tuple[tuple[Step, tuple[Rank, ...]], ...] = ()

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the members, in the order of their places."""
        return tuple(seat.member.number for seat in self.seats)

    @cached_property
    def places(self) -> Mapping[int, int]:
        """The place of each member, by its number."""
        return {number: place for place, number in enumerate(self.numbers)}


@dataclass(frozen=True)
class Follow:
    """Get the state from the members of an epoch, of which the receiver is none, and make their steps again until it takes part.

    Attributes:
        seats: The members, sorted by number.
    """

    epoch: Count
    seats: tuple[Seat, ...]


@dataclass(frozen=True)
class Dismiss:
    """Take part no longer, and end: you have left, or others have gone on without you."""

    reason: Word


@dataclass(frozen=True)
class Finish:
    """All members have made all steps: end."""


Message = Prepare | Begin | Follow | Dismiss | Finish


@dataclass(frozen=True)
class Order:
    """A message to some processes, of which each gets it as a line of its own (`orders_to_json`)."""

    to: tuple[Member, ...]
    message: Message


_MESSAGES: dict[str, type[Message]] = {
    "prepare": Prepare,
    "begin": Begin,
    "follow": Follow,
    "dismiss": Dismiss,
    "finish": Finish,
}
_KIND_OF = {cls: kind for kind, cls in _MESSAGES.items()}


@dataclass(frozen=True)
class _Head:
    kind: Word
    to: Member


def order_to_json(to: Member, message: Message) -> str:
    """Write the order to one process as a line of JSON."""
    [(_, line)] = orders_to_json([Order((to,), message)])
    return line


def orders_to_json(orders: Iterable[Order]) -> Iterator[tuple[Member, str]]:
    """Yield each process that gets an order, and the line for it; what many get is as long as they are many, and written once."""
    for order in orders:
        fields = json.dumps(asdict(order.message))[1:]
        for member in order.to:
            head = json.dumps({"kind": _KIND_OF[type(order.message)], "to": asdict(member)})
            yield member, head[:-1] + (", " if len(fields) > 1 else "") + fields


def order_from_json(data: bytes) -> Order | BadRecord:
    """Read an order to one process, which may come from another machine; see `records/parser.py`."""
    head = read(_Head, data)
    if isinstance(head, BadRecord):
        return head
    cls = _MESSAGES.get(head.kind)
    if cls is None:
        return BadRecord(f"`kind` is {head.kind[:40]!r}, which no order has")
    message = read(cls, data)
    if isinstance(message, BadRecord):
        return message
    if isinstance(message, Begin) and {len(message.kept), len(message.todo), len(message.blocks)} != {
        len(message.seats)
    }:
        return BadRecord("`kept`, `todo` and `blocks` are not as long as `seats`")
    if isinstance(message, Begin) and message.shares:
        if len(message.shares) != len(message.seats):
            return BadRecord("`shares` is not as long as `seats`")
        if not all(share is None or share.is_possible for share in message.shares):
            return BadRecord("`shares` names a slot that is not there")
    return Order((head.to,), message)


for _cls in (Member, Seat, Share, Prepare, Begin, Follow, Dismiss, Finish, _Head):
    let_parse(_cls)
