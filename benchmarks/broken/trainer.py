"""Workers send a vector to the server and wait for its answer, step by step; `fault.json` says who breaks when."""

from collections.abc import Iterator

import torch

from ttlaunch.train import RankContext

from .faults import break_if_due
from .recipe import Config

_STEPS = 200


def worker(cfg: Config, ctx: RankContext) -> None:  # noqa: ARG001 - nothing is configured
    """Send, and wait for the answer."""
    values_N = torch.ones(1000)
    for _ in _steps(ctx):
        ctx.send(values_N, dest=ctx.sole("server"))
        ctx.recv(values_N, source=ctx.sole("server"))


def server(cfg: Config, ctx: RankContext) -> None:  # noqa: ARG001 - likewise
    """Receive from all, and answer all."""
    values_N = torch.ones(1000)
    for _ in _steps(ctx):
        for peer in ctx.ranks("worker"):
            ctx.recv(values_N, source=peer)
        for peer in ctx.ranks("worker"):
            ctx.send(values_N, dest=peer)


def _steps(ctx: RankContext) -> Iterator[int]:
    for step in range(1, _STEPS + 1):
        ctx.step = step
        break_if_due(rank=int(ctx.rank), role=ctx.role, step=step)
        yield step
        ctx.report(step)
