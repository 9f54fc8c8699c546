"""All workers of a recorded elastic run with local steps, side by side in one process, without messages.

Who made which local step and whose weights an average is of follows from the run's epochs, as in
`ttlaunch/membership/local_epochs.py`. All else is a function of the seed and the text, so the bits are those of the recorded run.

Shapes: N = values of all parameters in one flat vector. W = workers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ttlaunch.membership.local_epochs import averagers_of, makers_of
from ttlaunch.runtime.comm.reduction import GradientTree, contiguous_blocks, mean_per_token
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import micro_batches
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.training.optimizers import Optimizer, build_optimizer, global_norm
from ttlaunch.runtime.training.passes import differentiate
from ttlaunch.runtime.training.rank_model import build_model
from ttlaunch.spec.recipe.recorded_epochs import RecordedEpoch
from ttlaunch.spec.recipe.sections import TrainingFile


class LocalState(NamedTuple):
    """What a worker has of its own between two averages.

    Attributes:
        window: Tokens and summed loss since the last average, shape `(2,)`, float64.
    """

    model: Model
    optimizer: Optimizer
    window: Tensor


def block_gradient(
    cfg: TrainingFile,
    ctx: RankContext,
    model: Model,
    *,
    tree: GradientTree,
    step: int,
    block: range,
    each: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> tuple[float, int]:
    """Leave the gradient of the mean loss of a block of a step's micro-batches in the model, added along the tree over the block.

    Args:
        cfg: The run's configuration.
        ctx: This rank.
        model: Whose loss it is.
        tree: Where micro-batches are added; empty before and after.
        step: The step that they belong to.
        block: Their indices.
        each: Goes through the indices.

    Returns:
        Mean loss per token, and tokens.
    """
    for index, x_BT, y_BT in micro_batches(cfg, ctx, step, indices=each(block)):
        loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
        tree.add(index - block.start, model.take_gradients(), tokens=tokens, loss=loss)
        model.zero_grad()
    return tree.mean(model.grads_N, micro_batches=len(block))


class RecordedWorkers:
    """The workers of a recorded run, each with weights and an optimizer of its own.

    Memory: weights, gradient and optimizer state of each worker that takes part at a time.
    """

    def __init__(self, cfg: TrainingFile, ctx: RankContext, first: LocalState) -> None:
        """Begin with the members of the first epoch.

        Args:
            cfg: The run's configuration.
            ctx: The context of the sole rank; `ctx.epochs` says who took part.
            first: What each of them begins with; later only read for what others report of a step.
        """
        self._cfg, self._ctx, self._first = cfg, ctx, first
        self._epochs: Sequence[RecordedEpoch] = ctx.epochs
        self._tree = ctx.gradient_tree(first.model.weights_N)
        came = self._epochs[0].came
        self._workers = {number: self._build(first.model.weights_N) for number in self._epochs[0].members}
        for number, worker in self._workers.items():
            if number not in came:
                _copy_state(first, worker)

    def step(self, step: int, agreed_N: Tensor) -> dict[str, float]:
        """Take a local step with each worker that made it; return what the first one reports: gradient norm and learning rate.

        Args:
            step: The step.
            agreed_N: The weights with which workers begin that come before it, shape `(N,)`.

        Cost: the work of all workers, one after the other. No message.
        """
        self._take_in(step - 1, agreed_N)
        makers = makers_of([(epoch.step, epoch.members) for epoch in self._epochs], step)
        blocks = contiguous_blocks(self._cfg.training_config.micro_batches, len(makers))
        known: dict[str, float] = {}
        for number, block in zip(makers, blocks, strict=True):
            if number not in self._workers:
                continue  # it ended with what it had learned since the last average
            found = self._step_of(self._workers[number], step, block)
            if not known:
                known = found
                self._first.model.grads_N.copy_(self._workers[number].model.grads_N)
                self._first.optimizer.squared_norms()  # which reports of this step may ask for
        return known

    @torch.no_grad()
    def average(self, step: int, into_N: Tensor) -> tuple[float, int]:
        """Average the weights of those that made the average after a step; return their mean loss since the last one, and tokens.

        Args:
            step: The step.
            into_N: Gets the average, shape `(N,)`.

        Order: the tree over the places of the workers, as `all_reduce` among them.
        """
        members = averagers_of([(epoch.step, epoch.members) for epoch in self._epochs], step)
        group = [self._workers[number] for number in members]
        tokens, loss = torch.stack([worker.window for worker in group]).sum(dim=0).tolist()
        for place, worker in enumerate(group):
            share = worker.window[0].item() / tokens if tokens else 1 / len(group)
            self._tree.add(place, worker.model.weights_N * share, tokens=0, loss=0.0)
        self._tree.mean(into_N, micro_batches=len(group))  # of no tokens, so it divides by 1
        return mean_per_token(loss, int(tokens)), int(tokens)

    @torch.no_grad()
    def agree(self, agreed_N: Tensor) -> None:
        """Let all workers continue from these weights, shape `(N,)`."""
        for worker in self._workers.values():
            worker.model.weights_N.copy_(agreed_N)
            worker.window.zero_()

    def states(self) -> Iterator[tuple[str, LocalState]]:
        """Yield what each worker has, with its place among them, such as `0of3`."""
        for place, number in enumerate(sorted(self._workers)):
            yield f"{place}of{len(self._workers)}", self._workers[number]

    def wait_before_update(self, ready: Callable[[], object]) -> None:
        """Call this before any worker's state changes, as for an optimizer."""
        for worker in self._workers.values():
            worker.optimizer.wait_before_update(ready)

    def _take_in(self, done: int, agreed_N: Tensor) -> None:
        """Let workers come that came after a step, and forget those that take part no more."""
        present = [epoch for epoch in self._epochs[1:] if epoch.step <= done]
        last = len(present)
        needed = {number for epoch in self._epochs[last:] for number in epoch.members}
        self._workers = {number: worker for number, worker in self._workers.items() if number in needed}
        if last and present[-1].step == done:
            self._workers |= {number: self._build(agreed_N) for number in present[-1].came}

    def _build(self, weights_N: Tensor) -> LocalState:
        model = build_model(self._cfg, self._ctx)
        optimizer = build_optimizer(self._cfg, model, total_steps=self._ctx.data(self._cfg).total_steps)
        with torch.no_grad():
            model.weights_N.copy_(weights_N)
        return LocalState(model, optimizer, torch.zeros(2, dtype=torch.float64))

    def _step_of(self, worker: LocalState, step: int, block: range) -> dict[str, float]:
        loss, tokens = block_gradient(self._cfg, self._ctx, worker.model, tree=self._tree, step=step, block=block)
        norm = global_norm(worker.optimizer.squared_norms())
        rate = worker.optimizer.step(step, norm=norm)
        worker.window.add_(torch.tensor([tokens, loss * tokens], dtype=torch.float64))
        return {"grad_norm": norm, "learning_rate": rate}


@torch.no_grad()
def _copy_state(source: LocalState, target: LocalState) -> None:
    """Copy the state of the optimizer and the counts since the last average, between workers with the same parameters."""
    held = dict(source.optimizer.named_state())
    for name, tensor in target.optimizer.named_state():
        tensor.copy_(held[name])
    target.window.copy_(source.window)
