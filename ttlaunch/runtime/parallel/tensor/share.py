"""One rank's share of a model whose matrices several ranks split, and the sums over these ranks.

`enter` and `leave` are two operators of which each is the derivative of the other. Where a column-parallel layer begins, every rank
has the same activations, but a rank's backward pass gives only the gradient through its own outputs. So `enter` returns activations
unchanged and adds up the gradients of the ranks. Where a row-parallel layer ends, every rank has one term of a sum. So `leave` adds
up the activations and returns gradients unchanged. Both sums have the same bits on all ranks, and so has all that follows.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = width of the residual stream.
Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
arXiv:1909.08053, 2019: f and g of section 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ttlaunch.runtime.comm.collectives import all_reduce
from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.parallel.tensor.layers import ColumnParallelConvolution, ColumnParallelLinear, RowParallelLinear
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

_PAIR = 30_070


@dataclass(frozen=True)
class ModelShare:
    """Which of the equal shares of a model's matrices a rank has.

    Attributes:
        place: The share's number, from 0. Share 0 also stands for parameters that all ranks have whole, such as norms'.
        count: The number of shares.
        communicator: How to reach the ranks that have the other shares; None if this process only stores the share and
            does not compute with it.
        among: The ranks that have the shares, in order.
    """

    place: int
    count: int
    communicator: Communicator | None = None
    among: tuple[Rank, ...] = ()

    @property
    def has_common_part(self) -> bool:
        """Whether checkpoints take the parameters that all ranks have whole from this rank."""
        return self.place == 0

    def linear_in(self, inputs: int, outputs: Sequence[int], *, bias: bool = True) -> nn.Module:
        """Build this share of the first of two linear layers, for the blocks of `model/layers.py`."""
        return ColumnParallelLinear(inputs, outputs, self, bias=bias)

    def convolution_in(self, inputs: int, outputs: int) -> nn.Module:
        """Build this share of a convolution, as the first of two layers."""
        return ColumnParallelConvolution(inputs, outputs, self)

    def linear_out(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
        """Build this share of the second of two layers."""
        return RowParallelLinear(inputs, outputs, self, bias=bias)

    def enter(self, x: Tensor) -> Tensor:
        """Return activations unchanged; the backward pass adds up the gradients of all ranks, in float32.

        Every rank of `among` must compute the same layers in the same order.

        Args:
            x: Equal on all ranks, any shape.

        Cost: none in the forward pass; in the backward pass an `all_reduce` of float32 of the shape of `x`.
        Order: that of `leave`.
        """
        apply: Callable[[Tensor, ModelShare], Tensor] = _Enter.apply
        return apply(x, self)

    def leave(self, x: Tensor) -> Tensor:
        """Add up the activations of all ranks, in float32; the backward pass returns the gradient unchanged.

        Every rank of `among` must compute the same layers in the same order.

        Cost: an `all_reduce` of float32 of the shape of `x`; none in the backward pass.
        Order: the tree over the ranks' places, so the same bits on every rank. One process has other bits, because it
            computes each value as one sum over all columns.
        """
        apply: Callable[[Tensor, ModelShare], Tensor] = _Leave.apply
        return apply(x, self)

    def add_up(self, x: Tensor, *, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the sum over all ranks in a new tensor, on every rank.

        Args:
            x: Any shape, equal on all ranks; only read. Every rank of `among` must call, in the same order.
            name: The operation's name, in reports.
            dtype: The type in which values are sent and added.

        Raises:
            ValueError: The share has no communicator.

        Cost: an `all_reduce` of `x` in `dtype`; between two ranks one message each way, of all bytes.
        Order: the tree over the ranks' places: the same bits on every rank and every run.
        """
        if self.communicator is None:
            raise ValueError("this share of a model is not on a rank that computes with the others")
        total = x.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        with operation(self.communicator, name):
            if self.count == 2:  # noqa: PLR2004 - as many bytes as an all-reduce moves, and the same sum, in half the time
                return _exchanged(self.communicator, total, other=self.among[1 - self.place])
            all_reduce(self.communicator, total.view(-1), among=self.among)
        return total


def share_of(communicator: Communicator, among: Sequence[Rank]) -> ModelShare | None:
    """Return this rank's share among the ranks that split a model; None if it is the only one."""
    return (
        ModelShare(among.index(communicator.rank), len(among), communicator, tuple(among)) if len(among) > 1 else None
    )


def _exchanged(communicator: Communicator, mine: Tensor, *, other: Rank) -> Tensor:
    """Return the sum of two ranks' tensors, on both.

    Each rank sends its whole tensor. An all-reduce would send a half and then a half of the sum: as many bytes, but two hops.
    """
    theirs = torch.empty_like(mine)
    arriving = communicator.irecv(theirs, source=other, tag=_PAIR)
    sending = communicator.isend(mine, dest=other, tag=_PAIR)
    arriving.wait()
    sending.wait()
    return theirs.add_(mine)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: ModelShare) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return ctx.share.add_up(gradient, name="input_gradients").to(gradient.dtype), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: ModelShare) -> Tensor:
        ctx.dtype = x.dtype
        return share.add_up(x, name="partial_sums")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient.to(ctx.dtype), None
