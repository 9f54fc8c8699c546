"""Divide the micro-batches of a validation among several ranks.

Shapes: V = micro-batches of a validation. n = ranks that share it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ttlaunch.runtime.comm.collectives import all_gather
from ttlaunch.runtime.comm.reduction import contiguous_blocks
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.training.validation import validation_losses
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile


def validate_together(cfg: TrainingFile, ctx: RankContext, step: int, *, model: Model) -> None:
    """Share a validation of the whole model among the ranks of this rank's role, as they are when it is called.

    Args:
        cfg: The training configuration.
        ctx: Every rank of the role must call, after the same step.
        step: The step after which the validation is made.
        model: All of it, equal on all ranks.

    Cost: that of `share_validation`.
    Order: that of `share_validation`.
    """
    among = ctx.ranks(ctx.role)
    evaluate = partial(validation_losses, cfg, ctx, model, among=among)
    share_validation(cfg, ctx, step, among=among, evaluate=evaluate)


def share_validation(
    cfg: TrainingFile,
    ctx: RankContext,
    step: int,
    *,
    among: Sequence[Rank],
    evaluate: Callable[[], Tensor],
    reporter: Rank | None = None,
) -> None:
    """Evaluate this rank's block of the micro-batches, gather all losses on all ranks, and report their mean.

    Args:
        cfg: The training configuration.
        ctx: Every rank of `among` must call, after the same step.
        step: The step after which the validation is made.
        among: Ranks that share the validation, each with a contiguous block of its micro-batches.
        evaluate: Returns the summed loss of each micro-batch of this rank's block, in order, as `validation_losses`
            does; an empty tensor if the block is empty.
        reporter: The rank that writes the mean to its records; None: the first of `among`.

    Cost: an `all_gather` of 8 V bytes.
    Order: losses are added in the order of the micro-batches, so the mean does not depend on n.
    """
    data, place = ctx.data(cfg), among.index(ctx.rank)
    losses_V = torch.zeros(data.validation_micro_batches, dtype=torch.float64)
    block = contiguous_blocks(len(losses_V), len(among))[place]
    losses_V[block.start : block.stop] = evaluate()
    with operation(ctx, "all_gather"):  # the name in reports and in formulas of recipes
        all_gather(ctx, losses_V, among=among)
    ctx.report_validation(
        step, losses_V.tolist(), tokens=data.validation_tokens, reporter=among[0] if reporter is None else reporter
    )
