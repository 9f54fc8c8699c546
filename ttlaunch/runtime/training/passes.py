"""The forward and the backward pass of one micro-batch, as every recipe whose ranks have a whole model runs them.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ttlaunch.runtime.audit.auditor import Audit, BlockDigest
from ttlaunch.runtime.comm.reduction import GradientTree
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import MicroBatch, micro_batches
from ttlaunch.runtime.model.backward import run_backward
from ttlaunch.runtime.model.dropout import Masks
from ttlaunch.runtime.model.losses import IGNORED, count_tokens, summed_loss
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.world import Rank
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
    run_backward(loss, whole.loss_scaler.seed(loss))
    return summed, tokens


class Expect(Protocol):
    """Called before the backward pass of a micro-batch, with its index, the number of tokens, and their summed loss."""

    def __call__(self, index: int, *, tokens: int, loss: float) -> None: ...


Compute = Callable[[MicroBatch, BeforeBackward | None], tuple[float, int]]
"""Differentiates a micro-batch and calls something before its backward pass; returns what `differentiate` returns."""


def differentiated(  # noqa: PLR0917  users' trainers call it so
    cfg: TrainingFile,
    ctx: RankContext,
    step: int,
    model: Model,
    compute: Compute | None = None,
    *,
    among: Sequence[Rank] = (),
    indices: Iterable[int] | None = None,
    expect: Expect | None = None,
) -> Iterator[tuple[int, float, int]]:
    """Differentiate this rank's micro-batches of a step one after the other, and audit the step if that is due.

    Whoever iterates takes the gradients out of the model, and zeroes them, before asking for the next micro-batch.

    Args:
        cfg, ctx, step: As for `micro_batches`, which also says what `among` and `indices` are.
        model: All of it; its gradients are zero.
        compute: Differentiates one micro-batch, for the training and for audits; None: `differentiate` with the model's masks.
        expect: Called before each backward pass, whose gradients may then leave while it runs; not in an audited step.

    Yields:
        Index, summed loss and tokens of each micro-batch; its gradients are in the model then.

    Raises:
        AuditError: In an audited step, two ranks computed different gradients of the same micro-batches.

    Cost: no message; in an audited step the passes of another rank's block, and the messages of `Audit.settle`.
    """

    def differentiate_one(batch: MicroBatch, before: BeforeBackward | None) -> tuple[float, int]:
        index, x_BT, y_BT = batch
        return differentiate(model, x_BT, y_BT, masks=model.masks(step, index), before_backward=before)

    compute, audit = compute or differentiate_one, ctx.auditor.begin(cfg, step)
    batches = micro_batches(cfg, ctx, step, among=among, indices=indices)
    if audit is not None:
        yield from _audited(cfg, ctx, audit, batches=batches, compute=compute, model=model)
        return
    for batch in batches:
        yield batch[0], *compute(batch, None if expect is None else partial(expect, batch[0]))


def _audited(
    cfg: TrainingFile, ctx: RankContext, audit: Audit, *, batches: Iterable[MicroBatch], compute: Compute, model: Model
) -> Iterator[tuple[int, float, int]]:
    """Differentiate another rank's micro-batches for an audit, then this rank's own; compare before the last ones are used."""

    def rehearse(block: range) -> BlockDigest:
        found = audit.digest()
        model.zero_grad()
        with audit.computing(model):
            for batch in micro_batches(cfg, ctx, audit.step, indices=audit.each(block)):
                loss, tokens = compute(batch, None)
                found.add([model.take_gradients()], loss=loss, tokens=tokens)
                model.zero_grad()
        return found

    audit.found = rehearse(audit.block)
    for batch in batches:
        loss, tokens = compute(batch, None)
        audit.own.add([model.take_gradients()], loss=loss, tokens=tokens)
        if batch[0] == audit.own_block[-1]:  # nothing of this step has changed any weight yet
            audit.settle(rehearse)
        yield batch[0], loss, tokens


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
