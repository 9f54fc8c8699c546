"""Steps of equal ranks: a sum of all, and in the step that was ordered the hang; see `benchmarks/hangs.py`."""

import time

import torch
from torch import Tensor

from ttlaunch.recipe import ConfigFile
from ttlaunch.train import RankContext, all_reduce

from . import ways
from .order import LONG_S, note_begin, read_order

_IMPORTED = read_order()

if _IMPORTED.hang == "import":
    import os

    if int(os.environ["TTLAUNCH_RANK"]) == _IMPORTED.rank:
        note_begin()
        time.sleep(LONG_S)  # stuck: import


def peer(cfg: ConfigFile, ctx: RankContext) -> None:  # noqa: ARG001 - nothing is configured
    """Take steps."""
    order = read_order()
    values_N = torch.ones(64)
    if order.hang == "pauses":
        _announce_all(ctx)
    for step in range(1, order.steps + 1):
        ctx.step = step
        ctx.traffic.begin_step(step)
        _work(ctx, order.pace, step)
        if step == order.step and hasattr(ways, order.hang):
            getattr(ways, order.hang)(ctx, values_N, order.rank)
        _meet(ctx, values_N)
        ctx.report(step)


def _meet(ctx: RankContext, values_N: Tensor) -> None:
    all_reduce(ctx, values_N, among=ctx.ranks("peer"))  # stuck: left_out
    values_N.fill_(1.0)


def _work(ctx: RankContext, pace: list[float], step: int) -> None:
    """What a rank computes in a step: so long, and longer the higher its number."""
    if pace:
        time.sleep(pace[step % len(pace)] * (1 + ctx.rank) / ctx.world_size)


def _announce_all(ctx: RankContext) -> None:
    """What may take its time, as long as it says so: in one rank, and in all at once."""
    longest_s = max(read_order().pace)
    with ctx.announced("compilation"):
        time.sleep(2 * longest_s)
    for phase in ("evaluation", "checkpoint"):
        if ctx.rank == 0:
            with ctx.announced(phase):
                time.sleep(2 * longest_s)
        _meet(ctx, torch.ones(64))
