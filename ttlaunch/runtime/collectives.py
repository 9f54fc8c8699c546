"""Collective operations that more than one recipe needs, written with point-to-point messages between neighbours."""

from collections.abc import Sequence

import torch

from ttlaunch.runtime.context import RankContext


def chain_all_gather(ctx: RankContext, values: Sequence[float], *, role: str) -> list[float]:
    """Give every rank of a chain the values of all its ranks, in the order of the chain.

    They are collected towards the last rank, which hands the whole back; so only neighbours talk. For small vectors.

    Args:
        ctx: Every rank of the role must call.
        values: This rank's, any number of them.
        role: The ranks of the chain.

    Cost: at most 4 messages a rank, each of at most all values as float64; 2 * (ranks - 1) hops one after the other.
    """
    previous, following = ctx.previous(role), ctx.next(role)
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
