"""Divide a run's state where no member has to have all of it, among owners and shadows that take the same steps; and move it when members change.

The state is cut into *slots*. In an epoch each slot has an owner, which makes its updates, and a shadow, which gets the same
gradients and makes the same updates, so that it has the same bits. Both follow from the places of the members and from their hosts
alone, so all members agree without a message.

    place     0         1         2              host a: places 0 and 1     host b: place 2
    owns      slot 0    slot 1    slot 2
    shadows   slot 2    slot 0    slot 1

When a slot's owner and its shadow are both gone, nobody has it any more.

A cut depends on the number of its slots and on nothing else. Slots of two cuts therefore never need to be compared: a member that
gets its slots of a new cut keeps those of the old one until all members have got theirs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ttlaunch.membership.messages import Begin, Share


@dataclass(frozen=True)
class Slots:
    """The owner and the shadow of each slot in an epoch, by place.

    Attributes:
        owners: For each slot, the place of the member that owns it.
        shadows: For each slot, the place of the member that shadows it; None in an epoch with one member.
    """

    owners: tuple[int, ...]
    shadows: tuple[int | None, ...]

    @property
    def cut(self) -> int:
        """Into how many slots the state is cut."""
        return len(self.owners)

    def of(self, place: int) -> Share:
        """Return what the member at a place keeps: the slot that it owns first, then those that it shadows."""
        own = [slot for slot, owner in enumerate(self.owners) if owner == place]
        return Share(self.cut, (*own, *(slot for slot, shadow in enumerate(self.shadows) if shadow == place)))


def divide_slots(hosts: Sequence[str], *, slots: int = 0) -> Slots:
    """Give each slot an owner and a shadow; the shadow is on another host wherever hosts have few enough members.

    Args:
        hosts: The name of each member's host, in the order of their places.
        slots: Into how many slots the state is cut; the first members own one each, and shadow each other's. The shadow of a single
            slot is at place 1. 0: as many as there are members.

    Returns:
        The owner of slot i is the member at place i.
    """
    cut = min(slots, len(hosts)) or len(hosts)
    keepers = min(len(hosts), max(2, cut))
    after = _places_after(hosts[:keepers])
    return Slots(tuple(range(cut)), tuple(after[:cut]))


def covering_cut(shares: Iterable[Sequence[Share]]) -> int | None:
    """Return into how many slots the state is cut of which some members together have all; None if slots of every cut are missing.

    Args:
        shares: What each of these members has.
    """
    found: dict[int, set[int]] = {}
    for share in (one for some in shares for one in some):
        found.setdefault(share.cut, set()).update(share.slots)
    whole = [cut for cut, slots in found.items() if slots >= set(range(cut))]
    return max(whole, default=None)


def sources_of(slot: int, shares: Sequence[Share | None]) -> list[int]:
    """Return the places of the members that have a slot, and could give it."""
    return [place for place, share in enumerate(shares) if share is not None and slot in share.slots]


def sources_of_state(begin: Begin) -> list[int]:
    """Return the numbers of the members that have all of the state from which an epoch starts, in the order of their places."""
    if not begin.shares:
        return [number for number in begin.numbers if number in begin.holders]
    found = []
    for number, share in zip(begin.numbers, begin.shares, strict=True):
        has_all = number in begin.holders if share is None else set(range(share.cut)) <= set(share.slots)
        found += [number] if has_all else []
    return found


@dataclass(frozen=True)
class Piece:
    """Values of the flat vector of the model's parameters that are in one slot before and in one after.

    Attributes:
        before: The slot of the former cut.
        after: The slot of the new cut.
        values: The range.
    """

    before: int
    after: int
    values: range


@dataclass(frozen=True)
class Transfer:
    """What one member gives to another one, or keeps.

    Attributes:
        source: The place of the member that has it.
        dest: The place of the member that needs it; equal to `source` for what stays where it is.
    """

    source: int
    dest: int
    pieces: tuple[Piece, ...]


def plan_transfers(pieces: Sequence[Piece], shares: Sequence[Share | None], slots: Slots) -> list[Transfer]:
    """Choose for each member from whom it gets the values of its new slots; what it has itself it keeps.

    Args:
        pieces: Those between the two cuts.
        shares: What each member has, by place; all of the former cut.
        slots: Who owns and who shadows each slot of the new cut.

    Returns:
        At most one transfer for each source and destination. Of two members that have a slot, members take turns.

    Raises:
        ValueError: Nobody has a slot that a member needs.
    """
    found: dict[tuple[int, int], list[Piece]] = {}
    for dest in range(len(shares)):
        wanted = slots.of(dest).slots
        for piece in pieces:
            if piece.after not in wanted:
                continue
            sources = sources_of(piece.before, shares)
            if not sources:
                raise ValueError(f"nobody has slot {piece.before}")
            source = dest if dest in sources else sources[(dest + piece.before) % len(sources)]
            found.setdefault((source, dest), []).append(piece)
    return [Transfer(source, dest, tuple(some)) for (source, dest), some in sorted(found.items())]


def count_values(transfers: Sequence[Transfer]) -> int:
    """Count the values that travel; those that stay where they are do not."""
    return sum(len(piece.values) for one in transfers if one.source != one.dest for piece in one.pieces)


def _places_after(hosts: Sequence[str]) -> list[int | None]:
    """Return another place for each place, each exactly once, and on another host where that is possible."""
    if len(hosts) < 2:  # noqa: PLR2004 - it would be its own shadow
        return [None] * len(hosts)
    first = {host: place for place, host in reversed(list(enumerate(hosts)))}
    count = {host: hosts.count(host) for host in first}
    # In a row with the largest group first, whoever is as far away as that group is long belongs to another group.
    row = sorted(range(len(hosts)), key=lambda place: (-count[hosts[place]], first[hosts[place]], place))
    longest = max(len(list(group)) for _, group in groupby(row, key=lambda place: hosts[place]))
    shift = longest if longest < len(row) else 1
    after: list[int | None] = [None] * len(row)
    for at, place in enumerate(row):
        after[place] = row[(at + shift) % len(row)]
    return after
