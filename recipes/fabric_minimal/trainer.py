"""The smallest recipe: every rank makes the vector ones * (rank + 1), and an all-reduce adds these vectors.

    rank 0 -- shard --> rank 1 -- shard --> ... --> rank W-1 -- shard --> rank 0

The sum is 1 + 2 + ... + W = W(W + 1) / 2 in every place on every rank, so the result shows whether all ranks of a
cluster can communicate, and how fast. A ring moves 2(W - 1)/W of the vector over each link, whatever W is: no all-reduce needs
less. The price is 2(W - 1) hops one after the other, which is slow for small vectors on many ranks.

    ttlaunch run fabric_minimal
    ttlaunch run fabric_minimal --on 5loudboxes --set all_reduce_config.megabytes=64

Shapes: N = values of the vector; shard s is one of W contiguous parts of it, as equal as possible.
Source: P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 69(2), 2009:
its ring, which is also what the collective libraries use for large vectors.
"""

import statistics
import time

import torch
from torch import Tensor

from ttlaunch.train import RankContext, contiguous_blocks

from .recipe import Config


def peer(cfg: Config, ctx: RankContext) -> None:
    """Add up, check, measure."""
    peers = len(ctx.ranks("peer"))
    ones_N = torch.ones(max(1, int(cfg.all_reduce_config.megabytes * 1e6 / 4)), device=ctx.device)
    expected = peers * (peers + 1) / 2
    seconds = []
    for repeat in range(cfg.all_reduce_config.repeats + 1):
        vector_N = ones_N * (ctx.position("peer") + 1)
        ring_all_reduce(ctx, torch.zeros(peers, device=ctx.device))  # nobody is late when the clock starts
        began = time.perf_counter()
        ring_all_reduce(ctx, vector_N)
        if repeat:  # the first one also opens connections
            seconds.append(time.perf_counter() - began)
        wrong = int((vector_N != expected).sum())
        if wrong:
            raise ArithmeticError(f"{wrong} of {len(vector_N)} values of the sum are not {expected:g}")
        if ctx.should_stop():
            break
    if seconds and ctx.previous("peer") is None:
        _report(ctx, vector_N, seconds)


def ring_all_reduce(ctx: RankContext, vector_N: Tensor) -> None:
    """Replace the vector by the sum over all peers, in place.

    Args:
        ctx: Every peer must call, in the same order as its other collectives.
        vector_N: Shape `(N,)`, contiguous, the same N and dtype on every peer.

    Cost: `2 * (W - 1)` messages each way, `2 * (W - 1) / W` of the vector's bytes; a buffer of one shard.
    Order: shard s is summed as peers s, s+1, ..., s-1: the same bits on every run with this W, not with another.
    """
    peers, place = ctx.ranks("peer"), ctx.position("peer")
    count = len(peers)
    before, after = peers[place - 1], peers[(place + 1) % count]
    shards = [vector_N[block.start : block.stop] for block in contiguous_blocks(len(vector_N), count)]

    for hop in range(count - 1):  # reduce-scatter: sums travel once around
        mine, theirs = shards[(place - hop) % count], shards[(place - hop - 1) % count]
        arriving = torch.empty_like(theirs)
        receiving = ctx.irecv(arriving, source=before)
        sending = ctx.isend(mine, dest=after)
        receiving.wait()
        theirs.add_(arriving)
        sending.wait()

    for hop in range(count - 1):  # all-gather: finished shards travel once around
        mine, theirs = shards[(place + 1 - hop) % count], shards[(place - hop) % count]
        receiving = ctx.irecv(theirs, source=before)
        sending = ctx.isend(mine, dest=after)
        receiving.wait()
        sending.wait()


def _report(ctx: RankContext, vector_N: Tensor, seconds: list[float]) -> None:
    peers = len(ctx.ranks("peer"))
    vector_bytes = vector_N.numel() * vector_N.element_size()
    moved = 2 * (peers - 1) / peers * vector_bytes
    median = statistics.median(seconds)
    ctx.result("ranks", peers)
    ctx.result("sum", float(vector_N[0]))
    ctx.result("gigabytes_per_second", moved / median / 1e9)
    text = f"the sum over {peers} ranks is {float(vector_N[0]):g} in all {len(vector_N)} places, on every rank"
    speed = f"; {moved / 1e6:.1f} MB each way in {median * 1e3:.2f} ms (median), {moved / median / 1e9:.2f} GB/s"
    print(text + (speed if peers > 1 else "; one rank has nobody to talk to"))
