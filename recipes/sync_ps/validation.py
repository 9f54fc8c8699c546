"""What is evaluated and where the losses go: the weights and, beside them, their average, if servers keep one.

    server  -- average, its part --> worker -- losses of its share, a row each --> first server -- go on? --> all

Workers have the weights already. The losses of micro-batches are joined in the order of the micro-batches, so the mean has the bits of
one process.

Shapes: V = micro-batches of a validation, R = 1 for the weights alone, 2 with their average.
"""

import torch
from torch import Tensor

from ttlaunch.train import (
    Model,
    ParameterServer,
    ParameterServerClient,
    ParameterShard,
    PolyakAverage,
    RankContext,
    all_gather,
    contiguous_blocks,
    validate_together,
    validation_losses,
)

from .recipe import Config


def make_average(cfg: Config, model: Model | ParameterShard) -> PolyakAverage | None:
    """The average of these weights; None if the configuration asks for none."""
    keys = cfg.sync_ps_config
    if keys.polyak_interval is None:
        return None
    return PolyakAverage(model, interval=keys.polyak_interval, decay=keys.polyak_decay)


def evaluate(cfg: Config, ctx: RankContext, step: int, *, model: Model, average: PolyakAverage | None) -> None:
    """One process evaluates all of it."""
    losses = [validation_losses(cfg, ctx, model)]
    if average is not None:
        with average.in_place():
            losses.append(validation_losses(cfg, ctx, model))
    _report(cfg, ctx, step, losses_RV=torch.stack(losses))


def send_validation(cfg: Config, ctx: RankContext, *, model: Model, client: ParameterServerClient) -> None:
    """A worker evaluates its share of the validation, of the average too if there is one."""
    losses = [validation_losses(cfg, ctx, model, among=client.members)]
    if cfg.sync_ps_config.polyak_interval is not None:
        with client.averaged_weights():
            losses.append(validation_losses(cfg, ctx, model, among=client.members))
    client.send_losses(torch.stack(losses))


def receive_validation(
    cfg: Config, ctx: RankContext, step: int, *, server: ParameterServer, average: PolyakAverage | None
) -> None:
    """The first server adds the shares up in the order of the micro-batches, and says whether training goes on."""
    if average is not None:
        server.send_average(average.average_N)
    if ctx.rank == ctx.ranks("server")[0]:
        losses_RV = server.receive_losses(ctx.data(cfg).validation_micro_batches, times=1 if average is None else 2)
        _report(cfg, ctx, step, losses_RV=losses_RV)
    server.agree_to_go_on()


def validate_among_members(
    cfg: Config, ctx: RankContext, step: int, *, model: Model, average: PolyakAverage | None
) -> None:
    """In an elastic run all ranks evaluate the weights, and the two that have the average evaluate that."""
    validate_together(cfg, ctx, step, model=model)
    keepers, data = ctx.ranks("member")[:2], ctx.data(cfg)
    if average is None or ctx.rank not in keepers:
        return
    losses_V = torch.zeros(data.validation_micro_batches, dtype=torch.float64)
    mine = contiguous_blocks(len(losses_V), len(keepers))[keepers.index(ctx.rank)]
    with average.in_place():
        losses_V[mine.start : mine.stop] = validation_losses(cfg, ctx, model, among=keepers)
    all_gather(ctx, losses_V, among=keepers)
    if ctx.rank == keepers[0]:
        values = data.validation_values(losses_V.tolist(), tokens=data.validation_tokens)
        ctx.result("validation loss of averaged weights", values["loss"])


def _report(cfg: Config, ctx: RankContext, step: int, *, losses_RV: Tensor) -> None:
    """Report both; the average's only in the summary, where the last one stays."""
    tokens = ctx.data(cfg).validation_tokens
    ctx.report_validation(step, losses_RV[0].tolist(), tokens=tokens)
    for average in losses_RV[1:].tolist():
        values = ctx.data(cfg).validation_values(average, tokens=tokens)
        ctx.result("validation loss of averaged weights", values["loss"])
