"""Who computes which leaves: after a change, what nobody has any more; in later steps, a block for each member.

The sums have the same bits for any division (`runtime/comm/reduction.py`), so these functions only decide about time.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

Leaves = tuple[int, int]
"""Some micro-batches in a row: the index of the first, and the one after the last."""


def choose_kept(held: Sequence[Sequence[Leaves]], *, micro_batches: int) -> list[list[Leaves]]:
    """Choose nodes that cover no leaf twice, larger nodes first and then those of earlier members.

    Nodes are aligned powers of two, so of two nodes one contains the other or they have no leaf in common. Whatever is no such
    node is not counted: it would be added in another order.

    Args:
        held: The nodes that each member has.
        micro_batches: M.

    Returns:
        For each member those that count, in the order of their leaves.
    """
    offered: dict[int, list[tuple[int, int]]] = {}  # by size, in the order of the members
    for place, nodes in enumerate(held):
        for first, stop in nodes:
            offered.setdefault(stop - first, []).append((place, first))
    is_covered = bytearray(micro_batches)
    kept: list[list[Leaves]] = [[] for _ in held]
    for size in sorted((size for size in offered if size > 0 and not size & (size - 1)), reverse=True):
        covered, last = b"\1" * size, micro_batches - size
        for place, first in offered[size]:
            # A larger node that contains it would cover its first leaf, too.
            if first <= last and not first % size and not is_covered[first]:
                is_covered[first : first + size] = covered
                kept[place].append((first, first + size))
    for nodes in kept:
        if len(nodes) > 1:
            nodes.sort()
    return kept


def divide_missing(
    kept: Sequence[Sequence[Leaves]], *, micro_batches: int, paces: Sequence[float | None]
) -> list[list[Leaves]]:
    """Divide the leaves that no member has among all, in the order of the members.

    Args:
        kept: The nodes that members have, without doubles.
        micro_batches: M.
        paces: Seconds that each member needs for a leaf; None if it is not known.

    Returns:
        For each member the leaves that it computes, in as few rows as possible.
    """
    has = bytearray(micro_batches)
    for first, stop in (node for nodes in kept for node in nodes):
        has[first:stop] = b"\1" * (stop - first)
    gaps, first = [], has.find(0)
    while first >= 0:
        stop = has.find(1, first)
        gaps.append((first, stop if stop > 0 else micro_batches))
        first = has.find(0, gaps[-1][1])
    counts = share(sum(stop - first for first, stop in gaps), paces, least=0)
    gaps.reverse()  # so that the next one is the last
    return [_take(count, gaps) if count else [] for count in counts]


def blocks_of(micro_batches: int, paces: Sequence[float | None]) -> list[Leaves]:
    """Cut all leaves into a block for each member, longer ones for faster members; each has at least one leaf.

    Raises:
        ValueError: There are more members than leaves.
    """
    blocks, begun = [], 0
    for count in share(micro_batches, paces, least=1):
        blocks.append((begun, begun + count))
        begun += count
    return blocks


def share(count: int, paces: Sequence[float | None], *, least: int) -> list[int]:
    """Share a number of equal pieces of work so that the last member ends as early as possible.

    Args:
        count: The pieces.
        paces: Seconds that each member needs for a piece; where one is not known, all count as equally fast.
        least: How many pieces each member gets at least.

    Raises:
        ValueError: There are fewer pieces than the members get at least.
    """
    if count < least * len(paces):
        raise ValueError(f"{count} micro-batches are too few for {len(paces)} members")
    known = [pace for pace in paces if pace is not None and pace > 0]
    if len(known) < len(paces) or len(set(known)) == 1:  # of equally fast ones, none has to be looked for
        short, longer = divmod(count, len(paces))  # as `contiguous_blocks` cuts them
        return [short + (place < longer) for place in range(len(paces))]
    counts = [least] * len(paces)
    ends = [((least + 1) * pace, place) for place, pace in enumerate(known)]  # when each would end with a piece more
    heapify(ends)
    for _ in range(count - sum(counts)):
        _, soonest = ends[0]
        counts[soonest] += 1
        heapreplace(ends, ((counts[soonest] + 1) * known[soonest], soonest))
    return counts


def step_seconds(blocks: Sequence[Leaves], paces: Mapping[int, float]) -> float:
    """Estimate how long a step takes: until the member ends that needs longest for its block; `paces` by place."""
    return max((stop - first) * paces[place] for place, (first, stop) in enumerate(blocks))


def _take(count: int, gaps: list[Leaves]) -> list[Leaves]:
    """Take so many leaves from the end of the list, which shrinks."""
    rows = []
    while count:
        first, stop = gaps.pop()
        end = min(stop, first + count)
        rows.append((first, end))
        count -= end - first
        if end < stop:
            gaps.append((end, stop))
    return rows
