"""Make the updates of a recorded run again, in one process, with the same bits: also those whose gradients were old.

Which weights a gradient is computed with, and in which order gradients arrive, depends on the speed of workers and on who comes and goes.
An update depends on nothing else: it is a function of its task, of the weights behind each of its gradients, and of the order of sums.

Shapes: N = values of all parameters in one flat vector, W = gradients of an update, each of a row of micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ttlaunch.runtime.comm.reduction import GradientTree, contiguous_blocks, mean_per_token
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import micro_batches
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.training.loop import TrainingLoop
from ttlaunch.runtime.training.optimizers import build_optimizer, global_norm
from ttlaunch.runtime.training.passes import differentiate
from ttlaunch.runtime.training.rank_model import build_model
from ttlaunch.runtime.training.validation import validation_losses
from ttlaunch.spec.recipe.recorded_updates import RecordedUpdate
from ttlaunch.spec.recipe.sections import TrainingFile


@dataclass(frozen=True)
class MicroBatchGradient:
    """The gradient of a micro-batch's summed loss, which the next one overwrites.

    Attributes:
        part: The place of its row in the update.
        is_last: Whether it is the last one of its row.
    """

    part: int
    index: int
    is_last: bool
    loss: float
    tokens: int


class MeanRule(Protocol):
    """Makes a mean gradient, with its loss per token, tokens and the factor of the learning rate."""

    def add(self, model: Model, one: MicroBatchGradient) -> None:
        """Take the gradient that a backward pass has added to the model's."""

    def finish(self, model: Model, step: int, update: RecordedUpdate) -> tuple[float, int, float]:
        """Leave the mean gradient in the model; return its loss, its tokens and the factor of the learning rate."""


def repeat_updates(cfg: TrainingFile, ctx: RankContext, rule: Callable[[Model], MeanRule]) -> None:
    """Train with the updates in `ctx.updates`, and report as `train_in_one_process` does.

    Args:
        cfg: The run's configuration.
        ctx: This rank; nothing is sent.
        rule: Returns what makes the mean of a task's gradients as the recorded run did.

    Cost: the work of all ranks, one after the other. Memory: S bytes for each version of the weights that a later gradient needs.
    """
    model, data = build_model(cfg, ctx), ctx.data(cfg)
    optimizer = build_optimizer(cfg, model, total_steps=data.total_steps)
    ctx.restore(model, optimizer)
    means, history = rule(model), _History(ctx.updates, done=ctx.steps_done)

    def validate(step: int) -> None:
        ctx.report_validation(step, validation_losses(cfg, ctx, model).tolist(), tokens=data.validation_tokens)

    first = ctx.steps_done + 1
    loop = TrainingLoop(cfg, ctx, validate=validate, norms=optimizer, saved=(model, optimizer))
    for step in loop.steps():
        if step - first >= len(ctx.updates):
            break  # the recorded run was stopped here
        update = ctx.updates[step - first]
        history.keep(step - 1, model.weights_N)
        _differentiate(cfg, ctx, update, model=model, means=means, history=history)
        history.put(step - 1, model.weights_N)
        loss, tokens, factor = means.finish(model, step, update)
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm, rate_factor=factor)
        ctx.report_update(step, task=update.task, parts=update.parts)
        loop.end_step(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    ctx.report_parameters(model.named_parameters())


def _differentiate(
    cfg: TrainingFile, ctx: RankContext, update: RecordedUpdate, *, model: Model, means: MeanRule, history: "_History"
) -> None:
    for part, (first, stop, version) in enumerate(update.parts):
        history.put(version, model.weights_N)
        for index, x_BT, y_BT in micro_batches(cfg, ctx, update.task, indices=range(first, stop)):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(update.task, index))
            means.add(model, MicroBatchGradient(part, index, index == stop - 1, loss, tokens))


class _History:
    """The versions of the weights that further updates need."""

    def __init__(self, updates: Sequence[RecordedUpdate], *, done: int) -> None:
        self._needed = {
            version: step for step, update in enumerate(updates, start=done + 1) for _, _, version in update.parts
        }
        self._kept: dict[int, Tensor] = {}

    def keep(self, version: int, weights_N: Tensor) -> None:
        """Copy the newest weights, and forget those that no further update needs."""
        step = version + 1
        self._kept = {old: kept_N for old, kept_N in self._kept.items() if self._needed[old] >= step}
        self._kept[version] = weights_N.clone()
        self._needed.setdefault(version, step)

    @torch.no_grad()
    def put(self, version: int, weights_N: Tensor) -> None:
        """Overwrite the model's weights with those of a version."""
        weights_N.copy_(self._kept[version])


class MeanAlongTree:
    """Adds the gradients of a task along the tree over its micro-batches, and lets the rate of an old one be smaller."""

    def __init__(self, tree: GradientTree, *, step_size: Callable[[float], float]) -> None:
        """Begin with no gradient; `step_size` returns the factor of the learning rate for a staleness."""
        self._tree, self._step_size = tree, step_size

    def add(self, model: Model, one: MicroBatchGradient) -> None:
        """Take a micro-batch's gradient."""
        self._tree.add(one.index, model.take_gradients(), tokens=one.tokens, loss=one.loss)
        model.zero_grad()

    def finish(self, model: Model, step: int, update: RecordedUpdate) -> tuple[float, int, float]:
        """Leave the mean in the model's gradients; see `MeanRule`."""
        loss, tokens = self._tree.mean(model.grads_N, micro_batches=update.parts[-1][1])
        return loss, tokens, self._step_size(step - 1 - update.version)


class MeanAroundRing:
    """Adds gradients as the workers of a ring do, each a row of micro-batches, and weights them by their age; see `BoundedMeans`."""

    def __init__(self, *, damping: float) -> None:
        """Begin with no gradient; `damping` is that of `BoundedMeans`."""
        self._damping = damping
        self._gradients: list[Tensor] = []
        self._tokens, self._losses = [0], [0.0]

    def add(self, model: Model, one: MicroBatchGradient) -> None:
        """Take a micro-batch's gradient, which stays in the model until its row is complete."""
        self._tokens[-1] += one.tokens
        self._losses[-1] += one.loss
        if one.is_last:
            grads_N, scaler = model.take_gradients(), model.loss_scaler
            self._gradients.append(grads_N.mul(1 / scaler.scale) if scaler.is_on else grads_N.clone())
            model.zero_grad()
            self._tokens.append(0)
            self._losses.append(0.0)

    def finish(self, model: Model, step: int, update: RecordedUpdate) -> tuple[float, int, float]:
        """Leave the mean in the model's gradients; see `MeanRule`."""
        weights = [1 / (1 + self._damping * (step - 1 - version)) for _, _, version in update.parts]
        for gradient_N, weight in zip(self._gradients, weights, strict=True):
            gradient_N.mul_(weight)
        counted = zip(self._tokens[:-1], update.parts, strict=True)
        weighted = sum(float(count) / (1 + self._damping * (step - 1 - version)) for count, (_, _, version) in counted)
        torch.div(sum_around_ring(self._gradients), weighted or 1.0, out=model.grads_N)
        if model.loss_scaler.is_on:
            model.grads_N.mul_(model.loss_scaler.scale)
        tokens, loss = sum(self._tokens), float(torch.tensor(self._losses[:-1], dtype=torch.float64).sum())
        self._gradients, self._tokens, self._losses = [], [0], [0.0]
        return mean_per_token(loss, tokens), tokens, 1.0


def sum_around_ring(gradients: Sequence[Tensor]) -> Tensor:
    """Add W vectors of N values with the bits of `RingBuffers`: shard s as those of worker s, s + 1, ..., s - 1."""
    sum_N = gradients[0].clone()
    for place, block in enumerate(contiguous_blocks(len(sum_N), len(gradients))):
        shard = slice(block.start, block.stop)
        total = gradients[place][shard].clone()
        for further in range(1, len(gradients)):
            total.add_(gradients[(place + further) % len(gradients)][shard])
        sum_N[shard] = total
    return sum_N
