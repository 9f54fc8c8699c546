"""Bounded staleness in its plainest form: the mean gradient of step s is applied K steps later, never earlier.

    step s:  every gradient travels once around the ring   worker 0 --> worker 1 --> ... --> worker W-1 --> worker 0
             all workers have the mean of step s, keep it, and update with the mean of step s - K

K is `staleness_bound`. Here every gradient is exactly K updates old from step K + 1 on, where `trainer.py` applies a mean as soon
as it is there and K steps later at the latest. Gradients of one step are equally old, so `staleness_damping` changes nothing.
With K = 0 the parameters have the bits of `trainer.py`. With another K they are those of `trainer.py` up to rounding, if there
every mean arrives as late as the bound allows: `trainer.py` adds up along the ring, this file along the tree.

    ttlaunch run classic_dp --naive

Shapes: N = values of all parameters, B = sequences of a micro-batch, T = tokens of a sequence.
Source: Y. Li et al., "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training", NeurIPS 2018.
"""

from collections import deque

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


def send_around(ctx: RankContext, tensor: torch.Tensor, *, owner: int) -> None:
    """Overwrite every worker's tensor with the owner's, which each worker passes on to the next one."""
    workers, place = ctx.ranks("worker"), ctx.position("worker")
    previous, following = workers[place - 1], workers[(place + 1) % len(workers)]
    if ctx.rank != owner:
        ctx.recv(tensor, source=previous)
    if following != owner:
        ctx.send(tensor, dest=following)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate with weights that are K updates old, average over the ring, apply the mean of K steps ago."""
    workers, bound, last_step = ctx.ranks("worker"), cfg.classic_dp_config.staleness_bound, ctx.data(cfg).total_steps
    num_micro_batches = cfg.training_config.micro_batches
    model = build_model(cfg, ctx)  # drawn from the seed, so equal on all workers
    optimizer = build_optimizer(cfg, model, total_steps=last_step)
    sums = ctx.gradient_tree(model.weights_N)
    blocks = contiguous_blocks(num_micro_batches, len(workers))
    owners = [rank for rank, block in zip(workers, blocks, strict=True) for _ in block]
    means = deque[tuple[int, torch.Tensor]]()
    for step in ctx.steps(cfg):
        mine = {}
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=workers):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            mine[index] = model.take_gradients().clone(), torch.tensor([loss, tokens], dtype=torch.float64)
            model.zero_grad()
        for index, owner in enumerate(owners):
            nothing = torch.empty_like(model.grads_N), torch.empty(2, dtype=torch.float64)
            gradient_N, counts = mine.get(index, nothing)
            send_around(ctx, gradient_N, owner=owner)
            send_around(ctx, counts, owner=owner)
            sums.add(index, gradient_N, loss=counts[0].item(), tokens=int(counts[1]))
        mean_N = torch.empty_like(model.grads_N)
        loss, tokens = sums.mean(mean_N, micro_batches=num_micro_batches)
        means.append((step, mean_N))
        while means and (means[0][0] <= step - bound or step == last_step):
            of_step, mean_N = means.popleft()
            model.grads_N.copy_(mean_N)
            optimizer.step(of_step, norm=global_norm(optimizer.squared_norms()))
        ctx.report(step, loss=loss, tokens=tokens)
    ctx.report_parameters(model.named_parameters())
