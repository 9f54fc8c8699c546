"""Data parallelism in its plainest form: every worker receives every micro-batch's gradient and adds them all up.

    gradient of micro-batch 0    worker 0 --> all others         every worker then holds all M gradients,
    gradient of micro-batch 1    worker 0 --> all others         adds them in the same order,
    gradient of micro-batch 2    worker 1 --> all others         and makes the same update

A worker sends M/W gradients to W - 1 others, M micro-batches and W workers: (W - 1) M/W times the size of the weights in a
step, where `trainer.py` sends 2(W - 1)/W times that size. The parameters have the same bits.

    ttlaunch run data_parallel --naive

Shapes: N = values of all parameters, B = sequences of a micro-batch, T = tokens of a sequence.
"""

import torch

from ttlaunch.train import (
    RankContext,
    broadcast,
    build_model,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    global_norm,
    micro_batches,
)

from .recipe import Config


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate this worker's micro-batches, exchange all gradients, update."""
    workers, num_micro_batches = ctx.ranks("worker"), cfg.training_config.micro_batches
    model = build_model(cfg, ctx)  # drawn from the seed, so equal on all workers
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    sums = ctx.gradient_tree(model.weights_N)
    blocks = contiguous_blocks(num_micro_batches, len(workers))
    owners = [rank for rank, block in zip(workers, blocks, strict=True) for _ in block]
    for step in ctx.steps(cfg):
        mine = {}
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=workers):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            mine[index] = model.take_gradients().clone(), torch.tensor([loss, tokens], dtype=torch.float64)
            model.zero_grad()
        for index, owner in enumerate(owners):
            gradient_N, counts = mine.get(index) or (
                torch.empty_like(model.grads_N),
                torch.empty(2, dtype=torch.float64),
            )
            broadcast(ctx, gradient_N, root=owner, among=workers)
            broadcast(ctx, counts, root=owner, among=workers)
            sums.add(index, gradient_N, tokens=int(counts[1]), loss=counts[0].item())
        loss, tokens = sums.mean(model.grads_N, micro_batches=num_micro_batches)
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm)
        ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    ctx.report_parameters(model.named_parameters())
