"""A backward pass that begins with the gradient of a tensor, as those of a stage of a pipeline and of a recomputed block do.

`tensor.backward(gradient)` does the same, but torch then imports its symbolic shapes to compare two shapes: on every rank, seconds and 40 MB.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def run_backward(out: Tensor, gradient: Tensor | None) -> None:
    """Add the gradients of everything that `out` was computed from to theirs; the same bits as `out.backward(gradient)`.

    Args:
        out: Needs a gradient.
        gradient: That of `out`, of its shape; None: 1, of a tensor with one value.
    """
    if gradient is None:
        out.backward()
        return
    if gradient.shape != out.shape:
        raise ValueError(f"a gradient of shape {tuple(gradient.shape)} for a tensor of shape {tuple(out.shape)}")
    apply: Callable[[Tensor, Tensor], Tensor] = _Begun.apply
    with torch.enable_grad():  # a backward pass may be within another one, where it is off
        begun = apply(out, gradient)
    begun.backward()


class _Begun(torch.autograd.Function):
    """A number without meaning whose gradient with respect to `out` is the given one."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None
