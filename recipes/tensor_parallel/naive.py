"""Tensor parallelism in its plainest form: the split of a matrix pair, and the two sums that make one model of the parts.

    x --f--> some outputs of the first matrix --> activation or heads --> as many inputs of the second matrix --g--> y

    f: forward the same x on every rank,        backward the sum of all ranks' gradients
    g: forward the sum of all ranks' outputs,   backward the same gradient on every rank

Each sum is an all-reduce of B T D values, two each way in a block. Every rank computes all that is outside such
pairs: embedding, norms, head. The parameters have the bits of `trainer.py` with as many ranks, and its losses those of one process within 1e-5.

    ttlaunch run tensor_parallel --naive

Shapes: B = sequences of a micro-batch, T = tokens of a sequence, D = width of the residual stream.
Source: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, 2019: f and g of section 3.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttlaunch import train
from ttlaunch.train import RankContext, all_reduce, differentiate, micro_batches, split_evenly

from .recipe import Config

Change = Callable[[Tensor], Tensor]


class ForthAndBack(torch.autograd.Function):
    """Change activations in one way and their gradients in another: f is (same, sum), g is (sum, same)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, changes: tuple[Change, Change]) -> Tensor:
        ctx.back = changes[1]
        return changes[0](x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.back(gradients[0]), None


def same(x: Tensor) -> Tensor:
    return x.view_as(x)


class SplitLinear(nn.Module):
    """The first layer of a pair (dim 0: some outputs) or the second (dim 1: some inputs, and the whole bias)."""

    def __init__(self, outputs: int, inputs: int, *, dim: int, total: Change, **where: Any) -> None:
        super().__init__()
        self.splits = {"weight": split_evenly((outputs, inputs), dim=dim, **where)}
        self.splits |= {"bias": split_evenly((outputs,), dim=0, **where)} if dim == 0 else {}
        self.weight = nn.Parameter(torch.empty(self.splits["weight"].local_shape))
        self.bias = nn.Parameter(torch.empty(self.splits["bias"].local_shape if dim == 0 else outputs))
        self.total, self.dim = total, dim

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == 0:
            return functional.linear(ForthAndBack.apply(x, (same, self.total)), self.weight, self.bias)
        return ForthAndBack.apply(functional.linear(x, self.weight), (self.total, same)) + self.bias


def worker(cfg: Config, ctx: RankContext) -> None:
    """Compute this rank's part of every matrix product of all micro-batches, update this rank's part."""
    ranks, place = ctx.ranks("worker"), ctx.position("worker")

    def total(x: Tensor) -> Tensor:
        result = x.detach().clone(memory_format=torch.contiguous_format)
        all_reduce(ctx, result.view(-1), among=ranks)
        return result

    split = partial(SplitLinear, total=total, place=place, count=len(ranks))
    layers: Any = SimpleNamespace(  # what the model makes the layers of its blocks with
        has_common_part=place == 0,
        linear_in=lambda inputs, outputs: split(sum(outputs), inputs, dim=0, matrices=outputs),
        linear_out=lambda inputs, outputs: split(outputs, inputs, dim=1),
    )
    model = train.build_model(cfg, ctx, share=layers)
    optimizer = train.build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    is_counted = [name in model.splits or place == 0 for name, _ in model.named_parameters()]  # whole ones once
    sums = ctx.gradient_tree(model.weights_N)
    for step in ctx.steps(cfg):
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            sums.add(index, model.take_gradients(), tokens=tokens, loss=loss)
            model.zero_grad()
        loss, tokens = sums.mean(model.grads_N, micro_batches=cfg.training_config.micro_batches)
        squares = torch.tensor(optimizer.squared_norms(), dtype=torch.float64) * torch.tensor(is_counted)
        norm = train.global_norm(total(squares).tolist())
        rate = optimizer.step(step, norm=norm)
        ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    ctx.report_parameters(model.named_parts())
