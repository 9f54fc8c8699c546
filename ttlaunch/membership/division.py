"""Who computes which leaves: after a change, what nobody has any more; in later steps, a block for each member.

The sums have the same bits for any division (`runtime/comm/reduction.py`), so these functions only decide about time.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from ttlaunch.spec.recipe.blocks import contiguous_blocks

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
    offered = sorted((first - stop, place, first) for place, nodes in enumerate(held) for first, stop in nodes)
    is_covered = [False] * micro_batches
    kept: list[list[Leaves]] = [[] for _ in held]
    for size, place, first in ((-negative, place, first) for negative, place, first in offered):
        is_node = size > 0 and not size & (size - 1) and not first % size and first + size <= micro_batches
        if is_node and not is_covered[first]:  # a larger node that contains it would cover its first leaf too
            is_covered[first : first + size] = [True] * size
            kept[place].append((first, first + size))
    return [sorted(nodes) for nodes in kept]


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
    has = [False] * micro_batches
    for first, stop in (node for nodes in kept for node in nodes):
        has[first:stop] = [True] * (stop - first)
    missing = [leaf for leaf in range(micro_batches) if not has[leaf]]
    found, begun = [], 0
    for count in share(len(missing), paces, least=0):
        found.append(_rows(missing[begun : begun + count]))
        begun += count
    return found


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
    if len(known) < len(paces):
        return [len(block) for block in contiguous_blocks(count, len(paces))]
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


def _rows(leaves: Sequence[int]) -> list[Leaves]:
    rows: list[Leaves] = []
    for leaf in leaves:
        if rows and rows[-1][1] == leaf:
            rows[-1] = (rows[-1][0], leaf + 1)
        else:
            rows.append((leaf, leaf + 1))
    return rows
