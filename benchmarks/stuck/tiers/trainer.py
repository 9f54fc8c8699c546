"""Steps of workers and an aggregator, which gets stuck where it was ordered; see `benchmarks/hangs.py`."""

import time
from collections.abc import Iterator

import torch

from ttlaunch.recipe import ConfigFile
from ttlaunch.train import RankContext

from .order import LONG_S, note_begin, read_order


def worker(cfg: ConfigFile, ctx: RankContext) -> None:  # noqa: ARG001 - nothing is configured
    """Send, and wait for the answer."""
    order, values_N = read_order(), torch.ones(1000)
    for step in _steps(ctx):
        if (order.hang, order.rank, order.step) == ("gradients_not_sent", ctx.rank, step):
            note_begin()
        else:
            ctx.send(values_N, dest=ctx.sole("aggregator"), operation="gradients")
        ctx.recv(values_N, source=ctx.sole("aggregator"), operation="weights")  # stuck: gradients_not_sent


def aggregator(cfg: ConfigFile, ctx: RankContext) -> None:  # noqa: ARG001 - likewise
    """Receive from all, and answer all."""
    order, values_N = read_order(), torch.ones(1000)
    for step in _steps(ctx):
        for peer in ctx.ranks("worker"):
            ctx.recv(values_N, source=peer, operation="gradients")
        if (order.hang, order.step) == ("service_role", step):
            note_begin()
            time.sleep(LONG_S)  # stuck: service_role
        for peer in ctx.ranks("worker"):
            ctx.send(values_N, dest=peer, operation="weights")


def _steps(ctx: RankContext) -> Iterator[int]:
    for step in range(1, read_order().steps + 1):
        ctx.step = step
        ctx.traffic.begin_step(step)
        yield step
        ctx.report(step)
