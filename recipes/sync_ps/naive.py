"""A synchronous parameter server in its plainest form: pull, differentiate, push; the server waits for all workers.

    server -- weights ----------------------> every worker      pull
    server <- a gradient per micro-batch ---- every worker      push; the server averages and updates

There is one server, whatever `num_servers` says: the number of servers does not change the parameters. They have the bits of
`trainer.py`, whose workers send the sum of their gradients, each part to the server that has these parameters.

    ttlaunch run sync_ps --naive

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
    """Pull the weights, differentiate this worker's micro-batches, push each gradient."""
    server, model = ctx.sole("server"), build_model(cfg, ctx)
    for step in ctx.steps(cfg):
        ctx.recv(model.weights_N, source=server)
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=ctx.ranks("worker")):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            ctx.send(model.take_gradients(), dest=server)
            ctx.send(torch.tensor([loss, tokens], dtype=torch.float64), dest=server)
            model.zero_grad()
        ctx.report(step)


def server(cfg: Config, ctx: RankContext) -> None:
    """Send the weights to all workers, wait for all gradients, average, update."""
    workers, num_micro_batches = ctx.ranks("worker"), cfg.training_config.micro_batches
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    sums = ctx.gradient_tree(model.weights_N)
    blocks = contiguous_blocks(num_micro_batches, len(workers))
    owners = [rank for rank, block in zip(workers, blocks, strict=True) for _ in block]
    for step in ctx.steps(cfg):
        for rank in workers:
            ctx.send(model.weights_N, dest=rank)
        for index, owner in enumerate(owners):
            counts = torch.empty(2, dtype=torch.float64)
            ctx.recv(model.grads_N, source=owner)
            ctx.recv(counts, source=owner)
            sums.add(index, model.grads_N, loss=counts[0].item(), tokens=int(counts[1]))
        loss, tokens = sums.mean(model.grads_N, micro_batches=num_micro_batches)
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm)
        ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    ctx.report_parameters(model.named_parameters())
