"""Sums over ranks along the tree of `reduction.py`: every shard goes to the rank that owns it, which adds in the order of the tree.

All collective sums use this module. A rank holds some nodes of the tree. The owner of a shard of the vector receives that
shard of every node and makes the remaining additions. So each addition of the tree is made once for each value, with the same
two operands, for any number of ranks and any division into shards.

Shapes: N = values of the vector. n = ranks, S = bytes of the vector, k = nodes that a rank holds.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.comm.reduction import contiguous_blocks
from ttlaunch.runtime.world import Rank

_SUM, _SHARD = 30_003, 30_004

Node = tuple[range, Tensor, Pending | None]
"""The leaves that a node covers, its sum, and the message to wait for before the sum may be read."""

Arriving = list[Node]

Nodes = list[tuple[range, Tensor | None]]
"""Nodes of the tree that one rank holds, in order: the leaves that each covers, and its sum where it is on this rank."""


def sum_shard(ctx: Communicator, held: Sequence[Nodes], *, shards: Sequence[range], among: Sequence[Rank]) -> Tensor:
    """Send every shard to its owner, and add up the one that this rank owns.

    Args:
        ctx: Every rank of `among` must call, in the same order as its other collectives.
        held: The nodes of each rank, in the order of `among`; together all ranks hold each of the leaves 0, 1, 2, ... once.
            The sums of this rank's nodes have shape `(N,)`, contiguous, equal N and dtype everywhere; they are only read.
        shards: The part of the vector that each rank owns; a part may be empty.
        among: The ranks, this one included.

    Returns:
        This rank's shard of the sum over all leaves, in a new tensor.

    Cost: for each other rank that owns something, k messages of that shard, k = nodes that this rank holds; with equal
        shards `k * (n - 1)` messages each way and `k * (n - 1) / n * S` bytes, and buffers for as many.
    Order: that of the tree over the leaves: the same bits on every run, and for any cut into nodes and shards.
    """
    place = among.index(ctx.rank)
    own = [sum_N for _, sum_N in held[place] if sum_N is not None]
    mine = shards[place]

    def receive(other: int, _: range) -> tuple[Tensor, Pending]:
        buffer = torch.empty(len(mine), dtype=own[0].dtype, device=own[0].device)
        return buffer, ctx.irecv(buffer, source=among[other], tag=_SUM)

    # Copies of this rank's own nodes, since `add_up` overwrites what it adds.
    parts = [sum_N[mine.start : mine.stop].clone() for sum_N in own]
    nodes = [[leaves for leaves, _ in theirs] for theirs in held]
    arriving = begin_receives(nodes, parts, place=place, receive=receive if mine else None)
    sends = [
        ctx.isend(sum_N[shard.start : shard.stop], dest=rank, tag=_SUM)
        for rank, shard in ((among[other], shards[other]) for other in next_around(place, len(among)))
        if shard
        for sum_N in own
    ]
    total = add_up(arriving)
    for sending in sends:
        sending.wait()
    return total


def begin_receives(
    held: Sequence[Sequence[range]],
    own: Sequence[Tensor],
    *,
    place: int,
    receive: Callable[[int, range], tuple[Tensor, Pending]] | None,
) -> Arriving:
    """List a shard of every rank's nodes, in the order of the leaves, and begin to receive those of other ranks.

    Args:
        held: The nodes of each rank, by the leaves that they cover; the nodes of a rank need not be neighbours.
        own: This rank's shard of each node that this rank holds.
        place: This rank's place.
        receive: Begins to receive this rank's shard of a node from the rank at a place; None if the shard is empty.

    Cost: that of `receive` for each node of the other ranks.
    """
    arriving: Arriving = []
    for other, nodes in enumerate(held):
        if other == place:
            arriving += [(leaves, part, None) for leaves, part in zip(nodes, own, strict=True)]
        elif receive is not None:
            arriving += [(leaves, *receive(other, leaves)) for leaves in nodes]
    return sorted(arriving, key=_first_leaf)


def gather_shards(ctx: Communicator, vector_N: Tensor, *, among: Sequence[Rank]) -> None:
    """Fill the vector on every rank: each rank has its own shard in place and receives the others.

    Args:
        ctx: Every rank of `among` must call, in the same order as its other collectives.
        vector_N: Shape `(N,)`, contiguous, of any dtype; shard s is part s of `contiguous_blocks(N, n)`.
        among: The ranks, in the order of their shards.

    Cost: `n - 1` messages each way, `(n - 1) / n * S` bytes.
    Order: every rank sends to the next ones around first; nothing is added up.
    """
    shards, place = contiguous_blocks(len(vector_N), len(among)), among.index(ctx.rank)
    mine = vector_N[shards[place].start : shards[place].stop]
    pending = [
        ctx.irecv(vector_N[shard.start : shard.stop], source=among[other], tag=_SHARD)
        for other, shard in enumerate(shards)
        if other != place and shard
    ]
    if shards[place]:
        others = next_around(place, len(among))
        pending += [ctx.isend(mine, dest=among[other], tag=_SHARD) for other in others]
    for message in pending:
        message.wait()


def next_around(place: int, count: int) -> list[int]:
    """List the places of the other ranks, from the next one around, so that not all send to the first at once."""
    return [*range(place + 1, count), *range(place)]


def add_up(arriving: Iterable[Node]) -> Tensor:
    """Add up nodes, given in the order of their leaves, as they arrive; then add the remaining ones from right to left."""
    stack = merge_halves(arriving)
    while len(stack) > 1:
        _add_top(stack)
    return stack[0][1]


def add_up_rows(nodes: Iterable[tuple[range, Sequence[float]]]) -> Sequence[float]:
    """Add up rows of numbers as `add_up` adds tensors: the same additions, without a tensor for each.

    Args:
        nodes: The leaves that each covers, in order, and its row; all rows are equally long.
    """
    stack: list[tuple[range, Sequence[float]]] = []

    def add_top() -> None:
        leaves, right = stack.pop()
        before, left = stack[-1]
        total = [one + other for one, other in zip(left, right, strict=True)]
        stack[-1] = (range(before.start, leaves.stop), total)

    for node in nodes:
        stack.append(node)
        while len(stack) > 1 and _are_halves(stack[-2][0], stack[-1][0]):
            add_top()
    while len(stack) > 1:
        add_top()
    return stack[0][1]


def merge_halves(arriving: Iterable[Node]) -> list[tuple[range, Tensor]]:
    """Combine the two halves of a node as soon as both have arrived, in the order of the leaves, as a binary counter carries.

    Args:
        arriving: Leaves, sum, and the message to wait for before the sum can be read; sums are overwritten.

    Returns:
        The largest complete nodes, each in the memory of its first part.
    """
    stack: list[tuple[range, Tensor]] = []
    for leaves, sum_N, message in arriving:
        if message is not None:
            message.wait()
        stack.append((leaves, sum_N))
        while len(stack) > 1 and _are_halves(stack[-2][0], stack[-1][0]):
            _add_top(stack)
    return stack


def _first_leaf(node: Node) -> int:
    return node[0].start


def _are_halves(left: range, right: range) -> bool:
    """Return whether two nodes are the halves of one node of the tree."""
    return len(left) == len(right) and left.start % (2 * len(left)) == 0


def _add_top(stack: list[tuple[range, Tensor]]) -> None:
    """Replace the top two nodes of the stack by their sum, in the memory of the left one."""
    leaves, right_N = stack.pop()
    before, left_N = stack[-1]
    left_N.add_(right_N)
    stack[-1] = (range(before.start, leaves.stop), left_N)
