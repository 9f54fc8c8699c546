"""DiLoCo in its plainest form: H inner steps alone, then one outer step of all workers together.

    every worker k:  repeat H times   w_k <- inner step(w_k, gradient of k's micro-batches)
    all workers:     average <- sum over k of (tokens of k / tokens of all) * w_k
                     d <- w - average;   m <- b m + d;   w <- w - a (d + b m);   w_k <- w

The average is an all-reduce every H steps (`diloco_config.every`), the outer step needs no message: every worker makes the same
one. a is `outer_learning_rate`, b is `outer_momentum`. The parameters have the bits of `trainer.py`.

    ttlaunch run diloco --naive

Shapes: N = values of all parameters, B = sequences of a micro-batch, T = tokens of a sequence.
Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, its Algorithm 1.
"""

import torch

from ttlaunch.train import (
    RankContext,
    all_reduce,
    build_model,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    global_norm,
    micro_batches,
)

from .recipe import Config


@torch.no_grad()
def average(ctx: RankContext, weights_N: torch.Tensor, *, seen: int) -> torch.Tensor:
    """The average of all workers' weights, each weighted by the tokens that its worker has seen."""
    total = torch.tensor([seen], dtype=torch.float64)
    all_reduce(ctx, total, among=ctx.ranks("worker"))
    average_N = weights_N * (seen / total.item())
    all_reduce(ctx, average_N, among=ctx.ranks("worker"))
    return average_N


def worker(cfg: Config, ctx: RankContext) -> None:
    """Take inner steps on this worker's micro-batches; after every H of them, and after the last, an outer step."""
    workers, last_step = ctx.ranks("worker"), ctx.data(cfg).total_steps
    rate, decay = cfg.diloco_config.outer_learning_rate, cfg.diloco_config.outer_momentum
    block = contiguous_blocks(cfg.training_config.micro_batches, len(workers))[ctx.position("worker")]
    model = build_model(cfg, ctx)  # drawn from the seed, so equal on all workers
    inner = build_optimizer(cfg, model, total_steps=last_step)
    agreed_N, momentum_N = model.weights_N.clone(), torch.zeros_like(model.weights_N)
    sums = ctx.gradient_tree(model.weights_N)
    seen = 0
    for step in ctx.steps(cfg):
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=workers):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            sums.add(index - block.start, model.take_gradients(), tokens=tokens, loss=loss)
            model.zero_grad()
        loss, tokens = sums.mean(model.grads_N, micro_batches=len(block))
        inner.step(step, norm=global_norm(inner.squared_norms()))
        seen += tokens
        if step % cfg.diloco_config.every == 0 or step == last_step:
            average_N = average(ctx, model.weights_N, seen=seen)
            outer_gradient_N = agreed_N - average_N
            momentum_N.mul_(decay).add_(outer_gradient_N)
            # w - a (d + b m), written from the average so that a = 1 and b = 0 give the average itself, bit for bit.
            agreed_N = average_N - ((outer_gradient_N + decay * momentum_N) * rate - outer_gradient_N)
            model.weights_N.copy_(agreed_N)
            seen = 0
        ctx.report(step, loss=loss, tokens=tokens)
    ctx.report_parameters(model.named_parameters())
