"""When a validation is due, what is reported with it, and the sum of its losses, which has the same bits for any number of ranks."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import validation_micro_batches
from ttlaunch.runtime.model.losses import summed_loss
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.training.passes import in_step
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile


class HasLayerNorms(Protocol):
    """An optimizer, or another object that knows the norms of the layers' gradients."""

    def layer_norms(self) -> dict[str, float]: ...


def validation_is_due(cfg: TrainingFile, ctx: RankContext, step: int) -> bool:
    """Whether a validation follows `step`: before the first (step 0), at every interval, and after the last."""
    return step % cfg.training_config.validation_interval == 0 or step == ctx.data(cfg).total_steps


def report_layer_norms(cfg: TrainingFile, ctx: RankContext, optimizer: HasLayerNorms, step: int) -> None:  # noqa: PLR0917  users' trainers call it so
    """Report the gradient norms of this rank's layers, if the configuration asks for them and a validation is due.

    The rank that made the update calls this; of replicas that made the same update, only one does.
    """
    if cfg.training_config.log_layer_grad_norms and validation_is_due(cfg, ctx, step):
        ctx.report_layer_norms(step, optimizer.layer_norms())


@torch.no_grad()
def validation_losses(
    cfg: TrainingFile, ctx: RankContext, model: Model, *, among: Sequence[Rank] = (), passes: int = 0
) -> Tensor:
    """Evaluate this rank's share of the validation, without dropout.

    Args:
        cfg: Sizes.
        ctx: The rank.
        model: All of it.
        among: Ranks that share the validation, each with a contiguous block of its micro-batches.
        passes: The number of passes that every rank makes, if a pass needs all of them; see `in_step`.

    Returns:
        Summed loss of each micro-batch of the share in order, float64, on the CPU; empty if the share is.
    """
    own = list(validation_micro_batches(cfg, ctx, among=among))
    batches = in_step(own, passes=passes, any_batch=lambda: next(validation_micro_batches(cfg, ctx)))
    with ctx.announced("evaluation"):
        losses = [summed_loss(model(x_BT), y_BT).item() for _, x_BT, y_BT in batches]
    return torch.tensor(losses[: len(own)], dtype=torch.float64)
