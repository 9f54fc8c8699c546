"""Three tiers in their plainest form: one whole vector in each message, one role after the other.

    optimizer  -- weights --------> aggregator -- weights --------------------> every worker
    optimizer  <- mean gradient --- aggregator <- a gradient per micro-batch -- every worker

The aggregator adds the gradients in the order of the micro-batches. The parameters have the bits of `trainer.py`, which sends
each worker's sum instead of every gradient, in buckets, while the backward pass still runs.

    ttlaunch run hierarchical_parallel --naive

Shapes: N = values of all parameters, B = sequences of a micro-batch, T = tokens of a sequence.
"""

import torch

from ttlaunch.train import (
    RankContext,
    build_model,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    global_norm,
    micro_batches,
)

from .recipe import Config


def worker(cfg: Config, ctx: RankContext) -> None:
    """Receive the weights, differentiate this worker's micro-batches, send each gradient."""
    aggregator, model = ctx.sole("aggregator"), build_model(cfg, ctx)
    for step in ctx.steps(cfg):
        ctx.recv(model.weights_N, source=aggregator)
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=ctx.ranks("worker")):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            ctx.send(model.take_gradients(), dest=aggregator)
            ctx.send(torch.tensor([loss, tokens], dtype=torch.float64), dest=aggregator)
            model.zero_grad()
        ctx.report(step)
    ctx.recv(model.weights_N, source=aggregator)
    ctx.report_parameters(model.named_parameters())


def aggregator(cfg: Config, ctx: RankContext) -> None:
    """Pass the weights on to the workers, and the mean of their gradients to the optimizer."""
    workers, optimizer, model = ctx.ranks("worker"), ctx.sole("optimizer"), build_model(cfg, ctx)
    num_micro_batches, sums = cfg.training_config.micro_batches, ctx.gradient_tree(model.weights_N)
    blocks = contiguous_blocks(num_micro_batches, len(workers))
    owners = [rank for rank, block in zip(workers, blocks, strict=True) for _ in block]
    for step in ctx.steps(cfg):
        ctx.recv(model.weights_N, source=optimizer)
        for rank in workers:
            ctx.send(model.weights_N, dest=rank)
        for index, owner in enumerate(owners):
            counts = torch.empty(2, dtype=torch.float64)
            ctx.recv(model.grads_N, source=owner)
            ctx.recv(counts, source=owner)
            sums.add(index, model.grads_N, loss=counts[0].item(), tokens=int(counts[1]))
        loss, tokens = sums.mean(model.grads_N, micro_batches=num_micro_batches)
        ctx.send(model.grads_N, dest=optimizer)
        ctx.report(step, loss=loss, tokens=tokens)
    ctx.recv(model.weights_N, source=optimizer)
    for rank in workers:
        ctx.send(model.weights_N, dest=rank)


def optimizer(cfg: Config, ctx: RankContext) -> None:
    """Send the weights, update them with the mean gradient that comes back; only this rank has optimizer state."""
    aggregator, model = ctx.sole("aggregator"), build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    for step in ctx.steps(cfg):
        ctx.send(model.weights_N, dest=aggregator)
        ctx.recv(model.grads_N, source=aggregator)
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm)
        ctx.report(step, grad_norm=norm, learning_rate=rate)
    ctx.send(model.weights_N, dest=aggregator)
    ctx.report_parameters(model.named_parameters())
