"""Activation checkpointing: keep the input of a block, and recompute the activations inside it in the backward pass.

Written here because `torch.utils.checkpoint` imports the compiler, two seconds on every rank. The second forward pass
makes the same operations on the same operands, dropout masks included (they are drawn from seed, step, micro-batch and
layer), so gradients have the same bits as without.

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = width of the residual stream.
Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, 2016, with one segment a
    block.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ttlaunch.runtime.model.backward import run_backward

Block = Callable[[Tensor], Tensor]


def recomputed(block: Block, x_BTD: Tensor) -> Tensor:
    """Compute `block(x_BTD)`, and keep only the input for the backward pass.

    Args:
        block: From shape (B, T, D) to the same; gives the same bits whenever it is called. The gradients of its
            parameters are added to theirs in the backward pass, with their hooks.
        x_BTD: Needs a gradient, or nothing behind it would get one.

    Cost: the block's forward pass once more; memory for one block's activations at a time.
    """
    apply: Callable[[Block, Tensor], Tensor] = _Recomputed.apply
    return apply(block, x_BTD)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Block, x_BTD: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x_BTD)
        return block(x_BTD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None]:
        (kept_BTD,) = ctx.saved_tensors
        x_BTD = kept_BTD.detach().requires_grad_()
        with torch.enable_grad():
            out_BTD = ctx.block(x_BTD)
        run_backward(out_BTD, *gradients)
        return None, x_BTD.grad
