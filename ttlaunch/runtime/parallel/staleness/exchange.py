"""Mean gradients for workers that may be up to K steps apart: each mean is applied up to K steps after its own step, in order.

Shapes: N = values of the flat gradient. W = workers, S = bytes of the gradient, K = the bound.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.comm.reduction import mean_per_token
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.staleness.protocol import Clock, Staleness
from ttlaunch.runtime.parallel.staleness.ring import RingBuffers
from ttlaunch.runtime.world import Rank


@dataclass(frozen=True)
class Mean:
    """A step's mean gradient, which is in the model's gradients until the next mean is requested.

    Attributes:
        step: The step that the averaged gradients belong to.
        loss: The mean loss per token, of all workers.
        tokens: The tokens of all workers.
        staleness: The staleness of each worker's gradient.
    """

    step: int
    loss: float
    tokens: int
    staleness: tuple[int, ...]


class MeanGradients(Protocol):
    """The calls with which a worker's loop gets the mean gradient of each step.

        def enter(indices):
            for index, ... in micro_batches(cfg, ctx, step, indices=indices):
                means.expect(index, tokens=..., loss=...)      # before the backward pass
                means.accumulate(index, tokens=..., loss=...)  # after it

        for step in ctx.steps(cfg):
            means.make(step, enter)
            for mean in means.ready(until=...):
                update the model for mean.step
        means.close()

    Attributes:
        staleness: The staleness of all gradients that were applied.
    """

    staleness: Staleness

    def make(self, step: int, enter: Callable[[Iterable[int]], object]) -> None:
        """Make this worker's part of a step, as soon as buffers are free for it.

        Args:
            step: The step; the first one of a run may be any, the others follow it one by one.
            enter: Differentiates the micro-batches with the given indices, with `expect` and `accumulate` for each.
        """

    def expect(self, index: int, *, tokens: int, loss: float) -> None:
        """Announce that the backward pass of a micro-batch comes next."""

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients of one micro-batch's *summed* loss; the step's gradient is complete after the block's last."""

    def ready(self, *, until: int) -> Iterator[Mean]:
        """Yield the means that are complete, in the order of the steps; wait for those of steps up to `until`."""

    def close(self) -> None:
        """Free the buffers of all steps; call this after the last mean. No message is under way afterwards."""


class BoundedMeans:
    """For K > 0: a ring of workers adds up every step's mean, while they compute up to K further steps.

    A worker receives, adds and passes on messages before and after each backward pass. A worker that may not continue waits for
    the oldest step that is not complete. This step needs no later step, so there is always a worker that can continue.

    The mean is weighted: each of a worker's tokens counts 1 / (1 + damping * s) if its gradient is s updates old. So
    where one worker leads, the others' fresh gradients count more. Equally old gradients have the plain mean.

    Cost of a step: that of `RingBuffers`. Memory: `2 * (K + 1) * S`.
    Source: W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016,
        where the learning rate falls with staleness; here the gradients of one mean have different weights.

    Attributes:
        block: This worker's micro-batches of each step.
    """

    def __init__(
        self,
        model: Model,
        *,
        ctx: Communicator,
        among: Sequence[Rank],
        blocks: Sequence[range],
        bound: int,
        damping: float,
        record: Callable[..., object] | None = None,
        staleness: Staleness | None = None,
    ) -> None:
        """Make room for K + 1 steps; nothing is sent.

        `record` is `RankContext.report_update`, on the ranks that record updates; `staleness` counts, if it is given.
        """
        self.staleness = staleness or Staleness()
        self._model = model
        self._blocks, self.block = blocks, blocks[among.index(ctx.rank)]
        self._clock = Clock(bound)
        self._rings = [RingBuffers(ctx, among=among, like_N=model.grads_N, tag=tag) for tag in range(bound + 1)]
        self._damping, self._record = damping, record
        self._tokens, self._loss = 0, 0.0

    def make(self, step: int, enter: Callable[[Iterable[int]], object]) -> None:
        """Differentiate this worker's micro-batches while the messages of earlier steps travel."""
        self.begin(step)
        enter(self.block)

    def begin(self, step: int) -> None:
        """Wait until the buffers of a step are free, and begin the step."""
        if not self._clock.begun:
            self._clock = Clock.after(step - 1, bound=self._clock.bound)  # all steps before are in the weights
        while not self._clock.may_begin:
            self._free()
        self._clock = self._clock.begin()
        assert self._clock.begun == step  # noqa: S101  the caller counts the same steps
        self._ring(step).open()
        self._tokens, self._loss = 0, 0.0

    def expect(self, index: int, *, tokens: int, loss: float) -> None:
        del index, tokens, loss
        self._advance()

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Leave the gradients in the model, where backward passes add those of all micro-batches in order."""
        self._tokens, self._loss = self._tokens + tokens, self._loss + loss
        if index == self.block[-1]:
            self._give()
        self._advance()

    def ready(self, *, until: int) -> Iterator[Mean]:
        """Yield the means that are complete; each is valid until the caller requests the next one."""
        while (mean := self.next_ready(until=until)) is not None:
            yield mean

    def next_ready(self, *, until: int) -> Mean | None:
        """Return the next mean, valid until the next call; wait for it if its step is at most `until`, else None if it is not there."""
        step = self._clock.applied + 1
        self._advance()
        if step <= until and step not in self._clock.whole:
            self._ring(step).advance(waits=True)
            self._clock = self._clock.complete(step)
        return None if self._clock.due is None else self._apply()

    @property
    def given(self) -> int:
        """The last step to which this worker has contributed; 0 before its first."""
        return self._clock.given

    def close(self) -> None:
        """Free all buffers, after waiting until the other workers have received everything from this one."""
        while self._clock.open_steps:
            self._free()

    def _free(self) -> None:
        self._ring(self._clock.freed + 1).close()
        self._clock = self._clock.free()

    def _give(self) -> None:
        """Send the step's gradient without the loss scale, which may differ between workers here; it is a power of two, so no bit is lost."""
        self._clock = self._clock.give()
        grads_N, scaler = self._model.take_gradients(), self._model.loss_scaler
        if scaler.is_on:
            grads_N.mul_(1 / scaler.scale)
        staleness = self._clock.staleness
        grads_N.mul_(1 / (1 + self._damping * staleness))
        self._ring(self._clock.given).give(grads_N, tokens=self._tokens, loss=self._loss, staleness=staleness)
        self._model.zero_grad()

    def _advance(self) -> None:
        """Process the messages of all open steps that have arrived, those of the oldest step first."""
        for step in self._clock.open_steps:
            is_missing = self._clock.applied < step <= self._clock.given and step not in self._clock.whole
            if is_missing and self._ring(step).advance(waits=False):
                self._clock = self._clock.complete(step)

    def _apply(self) -> Mean:
        self._clock = self._clock.apply()
        ring = self._ring(self._clock.applied)
        tokens, loss, _ = ring.counts.sum(dim=0).tolist()
        counted, _, ages = ring.counts.T.tolist()  # by worker
        staleness = tuple(int(one) for one in ages)
        for one in staleness:
            self.staleness.count(one)
        weighted = sum(count / (1 + self._damping * one) for count, one in zip(counted, staleness, strict=True))
        torch.div(ring.sum_N, weighted or 1.0, out=self._model.grads_N)
        if self._model.loss_scaler.is_on:
            self._model.grads_N.mul_(self._model.loss_scaler.scale)
        step = self._clock.applied
        if self._record is not None:  # before the update, so that nobody has weights whose origin is unknown
            ages_of_blocks = zip(self._blocks, staleness, strict=True)
            parts = [(block.start, block.stop, step - 1 - age) for block, age in ages_of_blocks]
            self._record(step, task=step, parts=parts)
        return Mean(step, mean_per_token(loss, int(tokens)), int(tokens), staleness)

    def _ring(self, step: int) -> RingBuffers:
        return self._rings[step % len(self._rings)]
