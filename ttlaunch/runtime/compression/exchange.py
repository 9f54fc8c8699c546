"""The mean gradient from what every rank's codec makes of its sum: gradients travel compressed, parameters never do.

    payload r = encode(sum of rank r's micro-batches)          each rank, once a step
    mean      = (decode(payload 0) + decode(payload 1) + ...) / tokens      all ranks, in this order

Every rank decodes all payloads, its own included, and adds them in the same order, so replicas that were equal stay equal
to the bit. What one process computes they equal up to the codec's error, and other numbers of ranks give other bits.

Shapes: N = values of the flat gradient. n = ranks, P = bytes of a payload.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ttlaunch.recipe import CompressionConfig
from ttlaunch.runtime.books.ledger import operation
from ttlaunch.runtime.compression.codec import build_codec
from ttlaunch.runtime.compression.powersgd import PowerSgd, matrices_in
from ttlaunch.runtime.compression.saved import CodecState
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.sockets.protocol import Pending
from ttlaunch.runtime.training.losses import mean_per_token
from ttlaunch.runtime.training.optimizers import Optimizer
from ttlaunch.runtime.world import Rank

_PAYLOAD, _COUNTS = 30_050, 30_051


class CompressedExchange:
    """Has the verbs of `GradientExchange`; gradients leave after the last backward pass of a step, in one message.

    With fp16 the loss scale is divided out before anything is encoded, so what is owed from one step to the next does not
    depend on it.

    Cost of a step: `(n - 1) * P` bytes each way, in `n - 1` messages, and as many of 16 bytes. Buffers for n payloads, one
    gradient, and what the codec keeps.
    Order: that of `among`; the same bits on every run with these ranks.
    Source: an all-gather of compressed gradients, as in H. Xu et al., "GRACE: A Compressed Communication Framework for
        Distributed Machine Learning", ICDCS 2021.
    """

    def __init__(self, model: Model, *, cfg: CompressionConfig, ctx: RankContext, among: Sequence[Rank]) -> None:
        """Build the codec; nothing is sent.

        Args:
            model: The local replica, flat.
            cfg: How to compress.
            ctx: How to reach the others.
            among: The ranks that share a step, in the order in which their gradients are added.
        """
        self._model, self._ctx, self._among = model, ctx, among
        self._place = among.index(ctx.rank)
        grads_N = model.grads_N
        parameters = list(model.parameters())
        starts = [int(parameter.storage_offset()) for parameter in parameters]
        self._matrices = matrices_in([parameter.shape for parameter in parameters], starts)
        self._codec = build_codec(cfg, len(grads_N), matrices=self._matrices, device=grads_N.device)
        self._note(cfg, len(grads_N))
        size = self._codec.payload_bytes(len(grads_N))
        self._payloads = [torch.empty(size, dtype=torch.uint8, device=grads_N.device) for _ in among]
        self._room_N = torch.empty_like(grads_N)
        self._saved: CodecState | None = None
        self._loss, self._tokens = 0.0, 0

    def saved_with(self, optimizer: Optimizer) -> CodecState:
        """What `ctx.restore` reads: the optimizer's state and this rank's codec's. See `checkpoint`."""
        self._saved = CodecState(optimizer, self._codec, sender=f"{self._place}")
        return self._saved

    def checkpoint(self, step: int) -> None:
        """`ctx.checkpoint`, which every rank calls: the first writes weights and optimizer, all what their codecs owe.

        Raises:
            ValueError: Nobody has called `saved_with`.
        """
        if self._saved is None:
            raise ValueError("`saved_with` says which optimizer belongs to the checkpoint; call it first")
        if self._place:
            self._ctx.checkpoint(step, self._saved.of_codec, self._saved.of_codec, owners=self._among)
        else:
            self._ctx.checkpoint(step, self._model, self._saved, owners=self._among)

    def expect(self, index: int, *, tokens: int, loss: float) -> None:
        """Nothing is sent before the block is complete."""

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter one micro-batch, whose gradients the backward pass has added to `grads_N`."""
        del index
        self._tokens += tokens
        self._loss += loss

    @torch.no_grad()
    def finish(self) -> tuple[float, int]:
        """Exchange payloads and leave the mean gradient in `grads_N`, on every rank.

        Returns:
            Mean loss per token and number of tokens of the whole step.
        """
        grads_N, scale = self._model.take_gradients(), self._model.loss_scaler.scale
        if scale != 1:
            grads_N.div_(scale)
        if self._saved is not None:
            self._saved.wait_before_encode()
        self._payloads[self._place] = self._codec.encode(grads_N)
        counts = [torch.tensor([self._tokens, self._loss], dtype=torch.float64) for _ in self._among]
        self._loss, self._tokens = 0.0, 0
        pending = [*self._swap(counts, "counts", _COUNTS), *self._swap(self._payloads, "gradients", _PAYLOAD)]
        for message in pending:
            message.wait()
        tokens, loss = int(sum(count[0].item() for count in counts)), sum(count[1].item() for count in counts)
        self._codec.decode(self._payloads[0], grads_N)
        for payload in self._payloads[1:]:
            self._codec.decode(payload, self._room_N)
            grads_N.add_(self._room_N)
        grads_N.div_(max(1, tokens))
        if scale != 1:
            grads_N.mul_(scale)
        return mean_per_token(loss, tokens), tokens

    def _swap(self, boxes: Sequence[Tensor], name: str, tag: int) -> list[Pending]:
        """This rank's box on its way to all others, and theirs to this one."""
        count = len(self._among)
        others = [(self._place + distance) % count for distance in range(1, count)]
        with operation(self._ctx, name):
            pending = [self._ctx.irecv(boxes[other], source=self._among[other], tag=tag) for other in others]
            mine = boxes[self._place]
            return pending + [self._ctx.isend(mine, dest=self._among[other], tag=tag) for other in others]

    def _note(self, cfg: CompressionConfig, num_values: int) -> None:
        """Tell the formula of the traffic which matrices are sent as factors."""
        if cfg.kind == "powersgd":
            factored = PowerSgd(num_values, rank=cfg.rank, matrices=self._matrices).factored
            sides = sum(matrix.rows + matrix.columns for matrix in factored)
            self._ctx.ledger.note(factored_sides=sides, factored_values=sum(matrix.size for matrix in factored))
