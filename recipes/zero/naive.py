"""ZeRO in its plainest form: every parameter, its gradient and its optimizer state have one owner.

    before a step:   every owner sends its parameters to all others
    in a step:       the gradient of a micro-batch is cut; each owner gets its part, and adds up the parts of all micro-batches
    after a step:    every owner updates its parameters, which no other worker keeps

Here an owner has some layers, and all layers are gathered at once, so that there is room for the whole model within a step.
`trainer.py` cuts every layer and has room for two of them. `zero_config.stage` changes nothing here. The parameters have the
bits of `trainer.py`.

    ttlaunch run zero --naive

Shapes: N = values of all parameters, B = sequences of a micro-batch, T = tokens of a sequence.
Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

import torch

from ttlaunch.train import (
    RankContext,
    broadcast,
    build_model,
    build_optimizer,
    build_shard,
    contiguous_blocks,
    cut_values,
    differentiate,
    micro_batches,
    shared_norm,
)

from .recipe import Config


def worker(cfg: Config, ctx: RankContext) -> None:
    """Own some parameters; compute with all of them, which their owners send."""
    workers, num_micro_batches = ctx.ranks("worker"), cfg.training_config.micro_batches
    owned = build_shard(cfg, ctx, among=workers)  # what this worker keeps from step to step
    model = build_model(cfg, ctx)  # scratch memory: the weights are the owners', the gradients are given away
    optimizer = build_optimizer(cfg, owned, total_steps=ctx.data(cfg).total_steps)
    parts = dict(zip(workers, cut_values(model, parts=len(workers)), strict=True))
    sums = ctx.gradient_tree(owned.weights_N)
    blocks = contiguous_blocks(num_micro_batches, len(workers))
    computed_by = [rank for rank, block in zip(workers, blocks, strict=True) for _ in block]
    for step in ctx.steps(cfg):
        model.weights_N[parts[ctx.rank].start : parts[ctx.rank].stop] = owned.weights_N
        for owner, part in parts.items():
            broadcast(ctx, model.weights_N[part.start : part.stop], root=owner, among=workers)
        mine = {}
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=workers):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            mine[index] = model.take_gradients().clone(), torch.tensor([loss, tokens], dtype=torch.float64)
            model.zero_grad()
        for index, source in enumerate(computed_by):
            gradient_N, counts = mine.get(index, (model.grads_N, torch.empty(2, dtype=torch.float64)))
            broadcast(ctx, counts, root=source, among=workers)
            for owner, part in parts.items():
                piece = gradient_N[part.start : part.stop]
                if ctx.rank == source != owner:
                    ctx.send(piece, dest=owner)
                elif ctx.rank == owner != source:
                    ctx.recv(piece, source=source)
                if ctx.rank == owner:
                    sums.add(index, piece, loss=counts[0].item(), tokens=int(counts[1]))
        loss, tokens = sums.mean(owned.grads_N, micro_batches=num_micro_batches)
        model.zero_grad()
        norm = shared_norm(ctx, optimizer, among=workers)
        rate = optimizer.step(step, norm=norm)
        ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    ctx.report_parameters(owned.named_parameters())
