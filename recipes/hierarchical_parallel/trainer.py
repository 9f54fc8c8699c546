"""Three tiers: workers differentiate, an aggregator averages their gradients, an optimizer updates the weights.

    workers 0..W-1 -- gradients --> aggregator -- mean gradient --> optimizer
    workers 0..W-1 <-- weights ---- aggregator <---- weights ------ optimizer

Only one rank keeps Adam's moments, so a worker needs room for the weights, one gradient and a few partial sums. The
price: a step moves 2S bytes per worker, S the size of the weights, and all of them pass the aggregator: 2(W + 1)S. In
two tiers the last two roles are one rank, which saves 2S and a hop. One trainer alone gives the same bits.

    ttlaunch run hierarchical_parallel
    ttlaunch run hierarchical_parallel --on 5loudboxes -c train.yaml

Shapes: N = values of all parameters in one flat vector, B = sequences in a micro-batch, T = tokens in a sequence,
V = micro-batches of a validation.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; here every update waits
for every worker, and gradients are added in one fixed order.
"""

import torch

from ttlaunch.runtime import (
    GradientTree,
    RankContext,
    RemoteOptimizer,
    build_model,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    global_norm,
    learning_rate,
    mean_per_token,
    micro_batches,
    train_in_one_process,
    validation_is_due,
    validation_losses,
)

from .recipe import Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process does everything: the reference that the tiers equal, bit for bit."""
    train_in_one_process(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate a contiguous block of each step's micro-batches; the optimizer is somewhere else."""
    server = (ctx.ranks("aggregator") or ctx.ranks("aggregator_optimizer"))[0]
    workers = ctx.ranks("worker")
    block = contiguous_blocks(cfg.training_config.micro_batches, len(workers))[ctx.position("worker")]
    model = build_model(cfg, ctx)
    optimizer = RemoteOptimizer(model.parameters(), server, ctx=ctx, block=block)
    optimizer.receive_weights()  # all workers begin with the optimizer's
    ctx.send(validation_losses(cfg, ctx, model, among=workers), dest=server)
    for step in ctx.steps(cfg):
        optimizer.zero_grad()
        losses, tokens = 0.0, 0
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=workers):
            loss, count = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            optimizer.accumulate(index, tokens=count, loss=loss)
            losses, tokens = losses + loss, tokens + count
        optimizer.step()  # gradients out, weights in
        ctx.report(step, loss=mean_per_token(losses, tokens), tokens=tokens)
        if validation_is_due(cfg, ctx, step):
            ctx.send(validation_losses(cfg, ctx, model, among=workers), dest=server)
    ctx.report_parameters(model.named_parameters())


def aggregator_optimizer(cfg: Config, ctx: RankContext) -> None:
    """Two tiers: average the workers' gradients and update the weights, on one rank."""
    model = build_model(cfg, ctx)
    total_steps = ctx.data(cfg).total_steps
    optimizer = build_optimizer(cfg, model, total_steps=total_steps)
    ctx.restore(model, optimizer)
    sums = ctx.gradient_tree(model.weights_N)
    _send_weights(ctx, model.weights_N)
    _receive_validation(cfg, ctx, ctx.steps_done)
    for step in ctx.steps(cfg):
        loss, tokens = _receive_mean_gradient(cfg, ctx, sums, model.grads_N)
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm)
        _send_weights(ctx, model.weights_N)
        ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
        ctx.checkpoint(step, model, optimizer)
        if validation_is_due(cfg, ctx, step):
            _receive_validation(cfg, ctx, step)
    ctx.report_parameters(model.named_parameters())


def aggregator(cfg: Config, ctx: RankContext) -> None:
    """Three tiers: average the workers' gradients; pass weights on from the optimizer."""
    optimizer = ctx.sole("optimizer")
    relay = build_model(cfg, ctx)
    sums = ctx.gradient_tree(relay.weights_N)
    ctx.recv(relay.weights_N, source=optimizer)
    _send_weights(ctx, relay.weights_N)
    _receive_validation(cfg, ctx, ctx.steps_done)
    total_steps = ctx.data(cfg).total_steps
    for step in ctx.steps(cfg):
        loss, tokens = _receive_mean_gradient(cfg, ctx, sums, relay.grads_N)
        ctx.send(relay.grads_N, dest=optimizer)
        ctx.recv(relay.weights_N, source=optimizer)
        _send_weights(ctx, relay.weights_N)
        ctx.report(step, loss=loss, tokens=tokens, learning_rate=learning_rate(cfg, step, total_steps=total_steps))
        if validation_is_due(cfg, ctx, step):
            _receive_validation(cfg, ctx, step)
    ctx.report_parameters(relay.named_parameters())


def optimizer(cfg: Config, ctx: RankContext) -> None:
    """Three tiers: the only rank with optimizer state; it talks to the aggregator alone."""
    aggregator = ctx.sole("aggregator")
    model = build_model(cfg, ctx)
    update = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    ctx.restore(model, update)
    ctx.send(model.weights_N, dest=aggregator)
    for step in ctx.steps(cfg):
        ctx.recv(model.grads_N, source=aggregator)
        norm = global_norm(update.squared_norms())
        rate = update.step(step, norm=norm)
        ctx.send(model.weights_N, dest=aggregator)
        ctx.report(step, grad_norm=norm, learning_rate=rate)
        ctx.checkpoint(step, model, update)
    ctx.report_parameters(model.named_parameters())


def _receive_mean_gradient(cfg: Config, ctx: RankContext, sums: GradientTree, out_N: torch.Tensor) -> tuple[float, int]:
    workers, count = ctx.ranks("worker"), cfg.training_config.micro_batches
    for rank, block in zip(workers, contiguous_blocks(count, len(workers)), strict=True):
        sums.receive(ctx, source=rank, block=block)  # goes on adding where the worker stopped
    return sums.mean(out_N, micro_batches=count)  # one division, after all sums


def _send_weights(ctx: RankContext, weights_N: torch.Tensor) -> None:
    for sending in [ctx.isend(weights_N, dest=rank) for rank in ctx.ranks("worker")]:
        sending.wait()


def _receive_validation(cfg: Config, ctx: RankContext, step: int) -> None:
    workers, data = ctx.ranks("worker"), ctx.data(cfg)
    losses_V = torch.empty(data.validation_micro_batches, dtype=torch.float64)
    for rank, block in zip(workers, contiguous_blocks(len(losses_V), len(workers)), strict=True):
        ctx.recv(losses_V[block.start : block.stop], source=rank)
    ctx.report_validation(step, losses_V.tolist(), tokens=data.validation_tokens)
