"""Three tiers as one writes them first: each parameter is a blocking MPI message, and workers come in rank order.

Model, data, micro-batches, sums and update are those of `hierarchical_parallel`; with `exchange: none` the workers do
all that they do there but for the messages, and the other ranks do nothing.
"""

from collections.abc import Iterable

import torch
from mpi4py import MPI
from torch import Tensor

from ttlaunch.train import (
    GradientTree,
    Model,
    RankContext,
    build_model,
    build_optimizer,
    differentiate,
    global_norm,
    micro_batches,
)

from .recipe import Config


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate a block of micro-batches; then gradients out and weights in, parameter by parameter."""
    model, aggregator = build_model(cfg, ctx), ctx.sole("aggregator")
    sums, is_naive = ctx.gradient_tree(model.weights_N), cfg.baseline_config.exchange == "naive"
    for step in ctx.steps(cfg):
        loss, tokens = _differentiate_block(cfg, ctx, model, sums, step)
        if is_naive:
            for gradient in _gradients(model):
                MPI.COMM_WORLD.Send(gradient.numpy(), dest=aggregator)
            for parameter in model.parameters():
                MPI.COMM_WORLD.Recv(parameter.detach().numpy(), source=aggregator)
        ctx.report(step, loss=loss / tokens, tokens=tokens)


def aggregator(cfg: Config, ctx: RankContext) -> None:
    """Take all gradients of one worker after the other, and hand weights on likewise."""
    if cfg.baseline_config.exchange == "none":
        return
    model, optimizer, workers = build_model(cfg, ctx), ctx.sole("optimizer"), ctx.ranks("worker")
    tokens = cfg.training_config.sequences_per_step * cfg.transformer_config.max_sequence_length
    box_N = torch.empty_like(model.weights_N)
    for _ in ctx.steps(cfg):
        model.zero_grad()
        for rank in workers:
            for gradient in _gradients(model):
                box = box_N[: gradient.numel()].view(gradient.shape)
                MPI.COMM_WORLD.Recv(box.numpy(), source=rank)
                gradient.add_(box)
        for gradient in _gradients(model):
            MPI.COMM_WORLD.Send(gradient.div_(tokens).numpy(), dest=optimizer)
        for parameter in model.parameters():
            MPI.COMM_WORLD.Recv(parameter.detach().numpy(), source=optimizer)
        for rank in workers:
            for parameter in model.parameters():
                MPI.COMM_WORLD.Send(parameter.detach().numpy(), dest=rank)


def optimizer(cfg: Config, ctx: RankContext) -> None:
    """Take all gradients, update, send all weights."""
    if cfg.baseline_config.exchange == "none":
        return
    model, aggregator = build_model(cfg, ctx), ctx.sole("aggregator")
    update = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    for step in ctx.steps(cfg):
        for gradient in _gradients(model):
            MPI.COMM_WORLD.Recv(gradient.numpy(), source=aggregator)
        update.step(step, norm=global_norm(update.squared_norms()))
        for parameter in model.parameters():
            MPI.COMM_WORLD.Send(parameter.detach().numpy(), dest=aggregator)


def _differentiate_block(
    cfg: Config, ctx: RankContext, model: Model, sums: GradientTree, step: int
) -> tuple[float, int]:
    """Leave the sum of the block's gradients in `grads_N`; returns summed loss and tokens."""
    losses, tokens = 0.0, 0
    model.zero_grad()
    batches = list(micro_batches(cfg, ctx, step, among=ctx.ranks("worker")))
    for index, x_BT, y_BT in batches:
        loss, count = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
        losses, tokens = losses + loss, tokens + count
        if index < batches[-1][0]:
            sums.add(index, model.take_gradients(), tokens=count, loss=loss)
            model.zero_grad()
    for node in sums.subtrees():
        model.grads_N.add_(node.gradient_N)
    sums.clear()
    return losses, tokens


def _gradients(model: Model) -> Iterable[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
