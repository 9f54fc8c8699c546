"""The mean gradient of all ranks, where each rank sends its sum through a codec; only gradients are compressed, never parameters.

    payload r = encode(sum of rank r's micro-batches)          each rank, once a step
    mean      = (decode(payload 0) + decode(payload 1) + ...) / tokens      all ranks, in this order

So equal replicas stay equal to the bit. They differ from a training in one process by the codec's error, and the bits depend on the
number of ranks.

Shapes: N = values of the flat gradient.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ttlaunch.runtime.checkpoint.checkpoints import held_tensors
from ttlaunch.runtime.comm.reduction import contiguous_blocks, mean_per_token
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.compression.saved import CodecState
from ttlaunch.runtime.parallel.compression.sums import CompressedSum, swap
from ttlaunch.runtime.training.optimizers import Optimizer
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import CompressionConfig

_COUNTS = 30_051


class CompressedExchange:
    """Has the methods of `GradientExchange`, but sends compressed gradients, after the last backward pass of a step.

    With fp16 the loss scale is divided out before anything is encoded, so the remainder, which a rank adds to its next
    gradient, does not depend on it. All ranks skip a step that overflowed, and each restores its previous remainder.

    Cost of a step: that of `CompressedSum`, and as many messages of 16 bytes.
    """

    def __init__(
        self, model: Model, *, cfg: CompressionConfig, ctx: RankContext, among: Sequence[Rank], micro_batches: int
    ) -> None:
        """Build the codec; nothing is sent.

        Args:
            model: The local replica, with flat vectors.
            cfg: How to compress.
            ctx: The context of this rank.
            among: The ranks that share a step, in the order in which their gradients are added.
            micro_batches: M, the micro-batches of a step, of which each rank has a contiguous block.
        """
        self._model, self._ctx, self._among = model, ctx, among
        self._place = among.index(ctx.rank)
        self._block = contiguous_blocks(micro_batches, len(among))[self._place]
        self._sum = CompressedSum(model, cfg=cfg, ctx=ctx, among=among)
        self._saved: CodecState | None = None
        self._skipped: int | None = None
        self._loss, self._tokens = 0.0, 0

    def saved_with(self, optimizer: Optimizer) -> CodecState:
        """Return the states of the optimizer and of this rank's codec, for `ctx.restore`; call before `checkpoint`."""
        self._saved = CodecState(optimizer, self._sum.codec, sender=f"{self._place}")
        return self._saved

    def checkpoint(self, step: int) -> None:
        """Write a checkpoint: the first rank weights and optimizer state, every rank the state of its codec.

        Before that, replicas are compared if that is due.

        Every rank must call, after the same step.

        Raises:
            ValueError: Nobody has called `saved_with`.
        """
        if self._saved is None:
            raise ValueError("`saved_with` names the optimizer whose state is saved; call it before `checkpoint`")
        self._take_back_if_skipped()
        self._compare(step)
        if self._place:
            self._ctx.checkpoint(step, self._saved.owed, self._saved.owed, owners=self._among)
        else:
            self._ctx.checkpoint(step, self._model, self._saved, owners=self._among)

    def _compare(self, step: int) -> None:
        if self._saved is not None:
            self._ctx.compare(step, partial(held_tensors, self._model, self._saved))

    def mean(self, step: int, enter: Callable[[Iterable[int]], object]) -> tuple[float, int]:
        """Make a step: leave the mean gradient in `grads_N`; see `GradientExchange.mean`.

        Cost: that of `finish`.
        Order: that of `finish`.
        """
        del step
        enter(self._block)
        return self.finish()

    def expect(self, index: int, *, tokens: int, loss: float) -> None:
        """Do nothing: `finish` sends the gradients, when the block is complete."""

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter one micro-batch, whose gradients the backward pass has added to `grads_N`."""
        del index
        self._tokens += tokens
        self._loss += loss

    @torch.no_grad()
    def finish(self) -> tuple[float, int]:
        """Exchange payloads and leave the mean gradient in `grads_N`, on every rank.

        Every rank of `among` must call, once a step, after the block's last `accumulate`.

        Returns:
            Mean loss per token and number of tokens of the whole step.

        Cost: `n - 1` messages of 16 bytes (float64) and `n - 1` of a payload (uint8), each way, n = ranks.
        Order: decoded payloads are added in the order of `among`, then divided once: the same bits on every rank and on
            every run with these ranks, but not those of one process.
        """
        grads_N, scale = self._model.take_gradients(), self._model.loss_scaler.scale
        if scale != 1:
            grads_N.div_(scale)
        if self._saved is not None:
            self._compare(self._ctx.steps_done)  # before the first update; does nothing later
            self._saved.owed.wait_before_encode()
        self._take_back_if_skipped()
        counts = [torch.tensor([self._tokens, self._loss], dtype=torch.float64) for _ in self._among]
        self._loss, self._tokens = 0.0, 0
        pending = swap(self._ctx, counts, name="counts", tag=_COUNTS, among=self._among)
        for message in [*pending, *self._sum.begin(grads_N, name="gradients")]:
            message.wait()
        self._skipped = self._model.loss_scaler.skipped
        tokens, loss = int(sum(count[0].item() for count in counts)), sum(count[1].item() for count in counts)
        self._sum.finish(grads_N)
        grads_N.div_(max(1, tokens))
        if scale != 1:
            grads_N.mul_(scale)
        return mean_per_token(loss, tokens), tokens

    def _take_back_if_skipped(self) -> None:
        """Undo the last `encode` if the optimizer has skipped the step; it decides so only after `finish`."""
        if self._skipped is not None and self._model.loss_scaler.skipped > self._skipped:
            self._sum.codec.take_back()
        self._skipped = None
