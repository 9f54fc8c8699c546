"""The forward and the backward pass of one micro-batch, as every recipe whose ranks have a whole model runs them.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ttlaunch.runtime.comm.reduction import GradientTree
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import MicroBatch, micro_batches
from ttlaunch.runtime.model.dropout import Masks
from ttlaunch.runtime.model.losses import IGNORED, count_tokens, summed_loss
from ttlaunch.runtime.model.model import Model
from ttlaunch.spec.recipe.sections import TrainingFile


class BeforeBackward(Protocol):
    """Called between forward and backward pass, with the loss and the number of tokens."""

    def __call__(self, *, tokens: int, loss: float) -> None: ...


def differentiate(
    model: nn.Module, x_BT: Tensor, y_BT: Tensor, *, masks: Masks, before_backward: BeforeBackward | None = None
) -> tuple[float, int]:
    """Add the gradient of one micro-batch's *summed* loss, times the loss scale with fp16, to the model's gradients.

    Args:
        model: All of it, or what stands in for it, such as DistributedDataParallel around it.
        x_BT: Tokens, int64.
        y_BT: The token that follows each; those that are `IGNORED` count for nothing.
        masks: What to draw dropout masks from.
        before_backward: Called with tokens and summed loss before the gradients are computed.

    Returns:
        The summed loss, and the number of tokens that it is summed over, which may be 0.
    """
    loss = summed_loss(model(x_BT, masks), y_BT)
    whole: Any = getattr(model, "module", model)  # DistributedDataParallel keeps it there
    summed, tokens = whole.note_loss(masks, loss.item()), count_tokens(y_BT)
    if before_backward is not None:
        before_backward(tokens=tokens, loss=summed)
    loss.backward(whole.loss_scaler.seed(loss))
    return summed, tokens


def mean_gradient(
    cfg: TrainingFile, ctx: RankContext, step: int, *, model: Model, sums: GradientTree
) -> tuple[float, int]:
    """Differentiate all micro-batches of a step on this rank, and leave the gradient of their mean loss in the model.

    Args:
        cfg: Sizes.
        ctx: The rank; nothing is sent.
        step: The step, from 1.
        model: All of it; its gradients are zero.
        sums: An empty tree, which is empty again afterwards.

    Returns:
        Mean loss per token, and tokens.

    Order: the tree over the micro-batches, so the bits are those of ranks that share the step.
    """
    for index, x_BT, y_BT in micro_batches(cfg, ctx, step):
        loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
        sums.add(index, model.take_gradients(), tokens=tokens, loss=loss)
        model.zero_grad()
    return sums.mean(model.grads_N, micro_batches=cfg.training_config.micro_batches)


def in_step(batches: Iterable[MicroBatch], *, passes: int, any_batch: Callable[[], MicroBatch]) -> Iterator[MicroBatch]:
    """Give this rank's micro-batches, then pad them to `passes` with micro-batches in which no target counts.

    Every pass of a sharded model needs all ranks; without padding, a rank with a shorter block would block the others.

    Args:
        batches: This rank's micro-batches.
        passes: The number of passes that every rank makes.
        any_batch: Gives any micro-batch of the step, whose shapes the padding has.

    Cost: a pass over one sequence, or image, for each micro-batch of padding.
    """
    count = 0
    for batch in batches:
        yield batch
        count += 1
    for _ in range(count, passes):
        index, x_BT, y_BT = any_batch()
        yield index, x_BT[:1], torch.full_like(y_BT[:1], IGNORED)
