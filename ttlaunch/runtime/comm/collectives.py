"""Collectives: what several ranks do together, written with the point-to-point messages of any communicator.

Every rank of `among` calls the same function with equal `among`; tensors that all ranks pass have equal shape and dtype.
Messages carry tags of their own, so they never mix with a recipe's. Sums follow one fixed binary tree over the places of
the ranks in `among`, so they have the same bits on every run and over every transport.

Shapes: N = values of a vector; shard s is part s of `contiguous_blocks(N, n)`. n = ranks of `among`, S = bytes of the
vector.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.comm.reduction import contiguous_blocks
from ttlaunch.runtime.comm.tree_exchange import gather_shards, sum_shard
from ttlaunch.runtime.world import Rank

_BARRIER, _BROADCAST, _GATHER = 30_000, 30_001, 30_002


def barrier(ctx: Communicator, *, among: Sequence[Rank]) -> None:
    """Return when every rank has called.

    Args:
        ctx: Every rank of `among` must call, in the same order as its other collectives.
        among: The ranks, in the same order everywhere.

    Cost: `ceil(log2(n))` messages each way, of one byte, n = ranks.
    Order: no rank returns before the last one has called; nothing is added up.
    Source: D. Hensgen, R. Finkel, U. Manber, "Two Algorithms for Barrier Synchronization", IJPP 17(1), 1988:
        dissemination.
    """
    place, count, distance = among.index(ctx.rank), len(among), 1
    token = torch.zeros(1, dtype=torch.uint8)
    while distance < count:
        sending = ctx.isend(token, dest=among[(place + distance) % count], tag=_BARRIER)
        ctx.recv(torch.empty_like(token), source=among[place - distance], tag=_BARRIER)
        sending.wait()
        distance *= 2


def broadcast(ctx: Communicator, tensor: Tensor, *, root: Rank, among: Sequence[Rank]) -> None:
    """Overwrite the tensor of every rank with that of `root`.

    Args:
        ctx: Every rank of `among` must call, in the same order as its other collectives.
        tensor: Contiguous, of any dtype; equal shape and dtype on all ranks.
        root: One of `among`.
        among: The ranks, in the same order everywhere.

    Raises:
        CommunicationError: A rank's tensor has another shape or dtype.

    Cost: `n - 1` messages of S bytes in all, S = bytes of the tensor; a rank sends at most `ceil(log2(n))` of them.
    Order: a binomial tree from `root`, so `ceil(log2(n))` hops one after the other; nothing is added up.
    """
    start, count = among.index(root), len(among)
    place, distance = (among.index(ctx.rank) - start) % count, 1
    while distance < count:  # each round doubles the number of ranks that have the tensor
        if place < distance and place + distance < count:
            ctx.send(tensor, dest=among[(start + place + distance) % count], tag=_BROADCAST)
        elif distance <= place < 2 * distance:
            ctx.recv(tensor, source=among[(start + place - distance) % count], tag=_BROADCAST)
        distance *= 2


def gather(ctx: Communicator, tensor: Tensor, *, root: Rank, among: Sequence[Rank]) -> list[Tensor]:
    """Give `root` the tensors of all ranks.

    Args:
        ctx: Every rank of `among` must call, in the same order as its other collectives.
        tensor: Contiguous, of any dtype; equal shape and dtype on all ranks. Only read.
        root: One of `among`.
        among: The ranks, in the same order everywhere.

    Returns:
        At `root`, one new tensor for each rank in the order of `among`; elsewhere an empty list.

    Raises:
        CommunicationError: At `root`: a rank's tensor has another shape or dtype.

    Cost: `n - 1` messages of S bytes, all to `root`, S = bytes of the tensor.
    Order: all ranks send at once; nothing is added up.
    """
    if ctx.rank != root:
        ctx.send(tensor, dest=root, tag=_GATHER)
        return []
    found = [tensor.detach().clone() if rank == root else torch.empty_like(tensor) for rank in among]
    arriving = [
        ctx.irecv(buffer, source=rank, tag=_GATHER) for rank, buffer in zip(among, found, strict=True) if rank != root
    ]
    for message in arriving:
        message.wait()
    return found


def all_gather(ctx: Communicator, vector_N: Tensor, *, among: Sequence[Rank]) -> None:
    """Fill the vector on every rank: each rank has its own shard in place and receives the others.

    Args:
        ctx: Every rank of `among` must call, in the same order as its other collectives.
        vector_N: Shape `(N,)`, contiguous, of any dtype; shard s is part s of `contiguous_blocks(N, n)`.
        among: The ranks, in the order of their shards.

    Cost: `n - 1` messages each way, `(n - 1) / n * S` bytes, S = bytes of the vector.
    Order: every rank sends its shard to the next ones around first; nothing is added up.
    """
    gather_shards(ctx, vector_N, among=among)


def reduce(ctx: Communicator, vector_N: Tensor, *, root: Rank, among: Sequence[Rank]) -> None:
    """Overwrite `root`'s vector with the sum of all; other ranks' vectors are only read.

    Args:
        ctx: Every rank of `among` must call, in the same order as its other collectives.
        vector_N: Shape `(N,)`, contiguous; equal N and dtype on all ranks.
        root: One of `among`.
        among: The ranks, in the same order everywhere.

    Cost: `n - 1` messages of S bytes, all to `root`. To spread them over the ranks, use `reduce_scatter` and `gather`.
    Order: that of `all_reduce`, the tree over the places in `among`: the same bits on every run.
    """
    shards = [range(len(vector_N)) if rank == root else range(0) for rank in among]
    total_N = sum_shard(ctx, _one_leaf_each(ctx, vector_N, among), shards=shards, among=among)
    if ctx.rank == root:
        vector_N.copy_(total_N)


def reduce_scatter(ctx: Communicator, vector_N: Tensor, *, among: Sequence[Rank]) -> Tensor:
    """Add up the vectors of all ranks, and return the shard of the sum that this rank owns; the vector is only read.

    Args:
        ctx: Every rank of `among` must call, in the same order as its other collectives.
        vector_N: Shape `(N,)`, contiguous; equal N and dtype on all ranks.
        among: The ranks, in the order of their shards.

    Returns:
        The rank's shard of the sum, in a new tensor; empty if there are more ranks than values.

    Cost: `n - 1` messages each way, `(n - 1) / n * S` bytes; buffers for as many bytes.
    Order: that of `all_reduce`, the tree over the places in `among`: the same bits on every run.
    """
    shards = contiguous_blocks(len(vector_N), len(among))
    return sum_shard(ctx, _one_leaf_each(ctx, vector_N, among), shards=shards, among=among)


def all_reduce(ctx: Communicator, vector_N: Tensor, *, among: Sequence[Rank]) -> None:
    """Overwrite the vector of every rank with the sum of all.

    Args:
        ctx: Every rank of `among` must call, in the same order as its other collectives.
        vector_N: Shape `(N,)`, contiguous; equal N and dtype on all ranks.
        among: The ranks, in the same order everywhere.

    Cost: `2 * (n - 1)` messages each way, `2 * (n - 1) / n * S` bytes, fewer than which are impossible; buffers for
        half as many bytes.
    Order: the tree over the places in `among`: ((0 + 1) + (2 + 3)) + ..., whatever N is. The same bits on every rank
        and on every run with this n.
    Source: R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004: its reduce-scatter and
        all-gather. Here shards go straight to their owners, so any number of ranks has the same form.
    """
    mine = contiguous_blocks(len(vector_N), len(among))[among.index(ctx.rank)]
    shard_N = reduce_scatter(ctx, vector_N, among=among)
    vector_N[mine.start : mine.stop].copy_(shard_N)
    gather_shards(ctx, vector_N, among=among)


def _one_leaf_each(
    ctx: Communicator, vector_N: Tensor, among: Sequence[Rank]
) -> list[list[tuple[range, Tensor | None]]]:
    """Make each rank's vector one leaf of the tree; only this rank's own vector is known here."""
    return [[(range(place, place + 1), vector_N if rank == ctx.rank else None)] for place, rank in enumerate(among)]


def chain_all_gather(ctx: Communicator, values: Sequence[float], *, among: Sequence[Rank]) -> list[float]:
    """Give every rank of a chain the values of all its ranks, in the order of the chain.

    This is for few values, where only neighbours may talk. Each rank appends its values to those of the ranks before it
    and sends them on; the last rank sends the complete list back along the chain.

    Args:
        ctx: Every rank of the chain must call, in the same order as its other collectives.
        values: This rank's values, any number of them; sent as float64.
        among: The ranks of the chain in order.

    Cost: at most 4 messages a rank: two of 8 bytes with the number of values, two of at most 8 bytes for every value of
        the chain; `2 * (n - 1)` hops one after the other.
    Order: along the chain and back; nothing is added up.
    """
    place = among.index(ctx.rank)
    previous = among[place - 1] if place else None
    following = among[place + 1] if place + 1 < len(among) else None
    collected = torch.tensor(values, dtype=torch.float64)
    if previous is not None:
        count = torch.empty(1, dtype=torch.int64)
        ctx.recv(count, source=previous)
        before = torch.empty(int(count.item()), dtype=torch.float64)
        ctx.recv(before, source=previous)
        collected = torch.cat([before, collected])
    if following is not None:
        ctx.send(torch.tensor([len(collected)]), dest=following)
        ctx.send(collected, dest=following)
        count = torch.empty(1, dtype=torch.int64)
        ctx.recv(count, source=following)
        collected = torch.empty(int(count.item()), dtype=torch.float64)
        ctx.recv(collected, source=following)
    if previous is not None:
        ctx.send(torch.tensor([len(collected)]), dest=previous)
        ctx.send(collected, dest=previous)
    return [float(value) for value in collected.tolist()]
