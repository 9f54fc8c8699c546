"""Fully sharded data parallelism in its plainest form: gather the weights, differentiate, reduce-scatter, update a shard.

    worker k of n keeps values k N/n .. (k + 1) N/n of weights, mean and squared mean, whatever layer they belong to

    all-gather       every worker has all weights for the passes of a step
    reduce-scatter   every worker has the sum of all workers' gradients, of its values only
    update           AdamW or SGD on these values

All layers are gathered at once, as with `shard: optimizer+gradients`; FSDP gathers one block after the other, which needs less
memory. The losses are those of `trainer.py` up to rounding: sums over workers are added in another order.

    ttlaunch run fully_sharded --naive

Shapes: N = values of all parameters, S = values of this worker, B = sequences of a micro-batch, T = tokens of a sequence.
"""

import torch

from ttlaunch.train import (
    RankContext,
    all_gather,
    all_reduce,
    build_model,
    contiguous_blocks,
    differentiate,
    learning_rate,
    mean_per_token,
    micro_batches,
    reduce_scatter,
)

from .recipe import Config


def worker(cfg: Config, ctx: RankContext) -> None:
    """Keep a shard of everything; differentiate this worker's micro-batches with the gathered weights."""
    workers, training, last_step = ctx.ranks("worker"), cfg.training_config, ctx.data(cfg).total_steps
    model = build_model(cfg, ctx)  # its flat vector is where shards are gathered
    shard = contiguous_blocks(model.weights_N.numel(), len(workers))[ctx.position("worker")]
    weights_S = model.weights_N[shard.start : shard.stop].clone()
    decays_N = torch.zeros_like(model.weights_N)  # 1 where weight decay applies: on matrices
    for parameter in model.parameters():
        start = parameter.data.storage_offset()
        decays_N[start : start + parameter.numel()] = float(parameter.dim() > 1)
    decays_S = decays_N[shard.start : shard.stop]
    optimizer: torch.optim.Optimizer = torch.optim.SGD([weights_S], momentum=training.beta1)
    if training.optimizer == "adamw":
        betas = training.beta1, training.beta2
        optimizer = torch.optim.AdamW([weights_S], betas=betas, eps=training.epsilon, weight_decay=0.0)
    for step in ctx.steps(cfg):
        model.weights_N[shard.start : shard.stop] = weights_S
        all_gather(ctx, model.weights_N, among=workers)
        seen = torch.zeros(2, dtype=torch.float64)  # summed loss, tokens
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=workers):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            seen += torch.tensor([loss, tokens], dtype=torch.float64)
        all_reduce(ctx, seen, among=workers)
        weights_S.grad = reduce_scatter(ctx, model.take_gradients(), among=workers).div_(max(1.0, seen[1].item()))
        model.zero_grad()
        square = weights_S.grad.double().square().sum().view(1)
        all_reduce(ctx, square, among=workers)
        norm = square.sqrt().item()
        if training.use_clip_grad_norm and norm > training.clip_grad_norm_max_norm:
            weights_S.grad.mul_(training.clip_grad_norm_max_norm / norm)
        rate = optimizer.param_groups[0]["lr"] = learning_rate(cfg, step, total_steps=last_step)
        weights_S.mul_(1 - rate * training.weight_decay * decays_S)
        optimizer.step()
        loss, tokens = mean_per_token(seen[0].item(), int(seen[1])), int(seen[1])
        ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    model.weights_N[shard.start : shard.stop] = weights_S
    all_gather(ctx, model.weights_N, among=workers)
    ctx.report_parameters(model.named_parameters())
