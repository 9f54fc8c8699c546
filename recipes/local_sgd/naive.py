"""Local SGD in its plainest form: H steps alone, then one average of all workers' weights.

    every worker k:  repeat H times   w_k <- step(w_k, gradient of k's micro-batches)
    all workers:     w <- sum over k of (tokens of k / tokens of all) * w_k;   w_k <- w

An all-reduce of the weights every H steps (`local_sgd_config.every`) is the only large message; an all-reduce of one number
before it adds up how many tokens the workers have seen. The parameters have the bits of `trainer.py`, except with SGD and H = 1:
there `trainer.py` averages gradients, which is the same up to rounding.

    ttlaunch run local_sgd --naive

Shapes: N = values of all parameters, B = sequences of a micro-batch, T = tokens of a sequence.
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


def worker(cfg: Config, ctx: RankContext) -> None:
    """Take steps on this worker's micro-batches; after every H of them, and after the last, average the weights."""
    workers, last_step = ctx.ranks("worker"), ctx.data(cfg).total_steps
    block = contiguous_blocks(cfg.training_config.micro_batches, len(workers))[ctx.position("worker")]
    model = build_model(cfg, ctx)  # drawn from the seed, so equal on all workers
    optimizer = build_optimizer(cfg, model, total_steps=last_step)
    sums = ctx.gradient_tree(model.weights_N)
    seen = 0
    for step in ctx.steps(cfg):
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=workers):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            sums.add(index - block.start, model.take_gradients(), tokens=tokens, loss=loss)
            model.zero_grad()
        loss, tokens = sums.mean(model.grads_N, micro_batches=len(block))
        optimizer.step(step, norm=global_norm(optimizer.squared_norms()))
        seen += tokens
        if step % cfg.local_sgd_config.every == 0 or step == last_step:
            average(ctx, model.weights_N, seen=seen)
            seen = 0
        ctx.report(step, loss=loss, tokens=tokens)
    ctx.report_parameters(model.named_parameters())


@torch.no_grad()
def average(ctx: RankContext, weights_N: torch.Tensor, *, seen: int) -> None:
    """Overwrite the weights with the average of all workers', each weighted by the tokens that it has seen."""
    total = torch.tensor([seen], dtype=torch.float64)
    all_reduce(ctx, total, among=ctx.ranks("worker"))
    weights_N.mul_(seen / total.item())
    all_reduce(ctx, weights_N, among=ctx.ranks("worker"))
