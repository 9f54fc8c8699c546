"""Find the first place at which ranks of a group have called different collective operations, and the rank that departed.

Ranks match collective operations only by their order, so from this place on nothing that they compute together is right, and often
they wait forever or torch ends one of them. The flight recorders have the last operations of each rank. A rank whose call
repeats the order of its earlier calls has gone on as before; the rank whose call does not is the one that departed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from ttlaunch.flight_recorder import SKIPPED, Operation, Recording
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.failures.failure import name_ranks
from ttlaunch.running.flight_recorders import describe_collective, short_place
from ttlaunch.running.hang.mismatch import what_must_match

_LONGEST_CONTEXT = 3

Call = tuple[str, int, str]
"""Name, bytes and line of an operation."""


@dataclass(frozen=True)
class Departure:
    """A rank that called another collective operation than the other ranks at the same place.

    Attributes:
        rank: The rank that departed.
        cause: A clause whose subject is the rank.
        place: The line of what it left out, or of what it called instead.
    """

    rank: int
    cause: str
    place: str | None


def find_departure(recordings: Mapping[int, Recording]) -> Departure | None:
    """Return the rank that departed first from the others of a group; None if the recordings show no such rank."""
    calls = {rank: _by_group(recording) for rank, recording in recordings.items()}
    for tag in sorted({tag for groups in calls.values() for tag in groups}):
        members = {rank: groups[tag] for rank, groups in calls.items() if tag in groups}
        for number in sorted({number for member in members.values() for number in member}):
            here = {rank: member[number] for rank, member in members.items() if number in member}
            if len({what_must_match(operation) for operation in here.values()}) > 1:
                return _departed(here, members, recordings, number=number)
    return None


def _by_group(recording: Recording) -> dict[int, dict[int, Operation]]:
    """Return the collective operations of a rank by the tag of their group and by their number in it."""
    found: dict[int, dict[int, Operation]] = {}
    for operation in recording.operations:
        if operation.is_collective:
            found.setdefault(operation.tag, {})[operation.message] = operation
    return found


def _departed(
    here: Mapping[int, Operation],
    members: Mapping[int, Mapping[int, Operation]],
    recordings: Mapping[int, Recording],
    *,
    number: int,
) -> Departure:
    """Choose between ranks that called different operations as the same number of their group."""
    before = {rank: [_call(one) for at, one in sorted(members[rank].items()) if at < number] for rank in here}
    goes_on = {rank for rank, operation in here.items() if _repeats(before[rank], _call(operation))}
    kinds = Counter(what_must_match(operation) for operation in here.values())
    usual, count = kinds.most_common(1)[0]
    most = {rank for rank, operation in here.items() if what_must_match(operation) == usual and 2 * count > len(here)}
    odd = here.keys() - (goes_on or most) or here.keys()
    # Without an order that repeats, and without a majority, nothing tells who is wrong: name the rank that called last.
    rank = max(odd, key=lambda one: (recordings[one].seconds(here[one].begun), one))
    own = here[rank]
    others = [other for other in sorted(here) if what_must_match(here[other]) != what_must_match(own)]
    theirs = here[others[0]]
    called = f"called {describe_collective(own)}{_at(own)}"
    wait = f"{name_ranks(others)} {'waits' if len(others) == 1 else 'wait'}"
    left_out = skipped_by(recordings).get(rank)
    if left_out is not None and left_out.name == theirs.name:
        cause = f"has skipped {theirs.name} after its forward pass{_at(left_out)}: it {called}, and {wait} in {theirs.name}{_at(theirs)}"
        return Departure(rank, cause, left_out.place or None)
    skipped = _skipped(before[rank], _call(own), _call(theirs)) if odd != here.keys() and rank not in goes_on else 0
    if skipped:
        rest = {1: "", 2: " and the operation after it"}.get(skipped, f" and the {skipped - 1} operations after it")
        cause = (
            f"has skipped {describe_collective(theirs)}{_at(theirs)}{rest}: it {called}, and {wait} in what it skipped"
        )
        return Departure(rank, cause, theirs.place or None)
    cause = f"{called}, where {name_ranks(others)} called {describe_collective(theirs)}{_at(theirs)}"
    return Departure(rank, cause, own.place or None)


def _repeats(before: Sequence[Call], call: Call) -> bool:
    """Whether a call has followed the calls before it already once."""
    for length in range(min(_LONGEST_CONTEXT, len(before)), 0, -1):
        context = before[-length:]
        ends = [at for at in range(length, len(before)) if before[at - length : at] == context]
        if ends:
            return any(before[at] == call for at in ends)
    return False


def _skipped(before: Sequence[Call], own: Call, theirs: Call) -> int:
    """Return how many operations a rank has left out, by its earlier order: from what the others called to what it called."""
    for at in range(len(before) - 1, -1, -1):
        if before[at] == theirs and own in before[at:]:
            return before[at:].index(own)
    return 0


def _at(operation: Operation) -> str:
    return f" at {short_place(operation.place)}" if operation.place else ""


def skipped_by(recordings: Mapping[int, Recording]) -> dict[int, Operation]:
    """Return what ranks have left out by their own records, by rank; empty if all ranks have left out something.

    A script may run several forward passes before one backward pass, on all ranks alike; that is no mistake.
    """
    found = {
        rank: operation
        for rank, recording in recordings.items()
        for operation in recording.operations
        if operation.verb == SKIPPED
    }
    return found if len(found) < len(recordings) else {}


def _call(operation: Operation) -> Call:
    return operation.name, operation.nbytes, operation.place
