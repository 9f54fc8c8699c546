"""Which values go from whom to whom when the shards of a model are cut anew for another number of members.

    before      |  slot 0  |  slot 1  |  slot 2  |        a member has the slot that it owns and the one that it shadows
    after       |    slot 0      |    slot 1     |        it keeps what of them is in its new slots, and gets the rest

Everybody works this out from the same `Begin`, so a member that has something knows who needs it, and no list is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ttlaunch.membership.messages import Share
from ttlaunch.membership.slots import Slots, sources_of
from ttlaunch.runtime.parallel.zero.layout import ShardLayout


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


def pieces_between(before: ShardLayout, after: ShardLayout) -> list[Piece]:
    """Return all values of the parameters, each exactly once, cut at the borders of both cuts, in ascending order.

    Args:
        before, after: Two cuts of the same model.
    """
    found = []
    for layer, other in zip(before.layers, after.layers, strict=True):
        for slot in range(len(layer.shards)):
            kept = before.kept(layer, slot)
            for new in range(len(other.shards)):
                wanted = after.kept(other, new)
                values = range(max(kept.start, wanted.start), min(kept.stop, wanted.stop))
                if values:
                    found.append(Piece(slot, new, values))
    return found


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
