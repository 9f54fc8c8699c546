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

from functools import partial

import torch

from ttlaunch.runtime import (
    AggregatorLink,
    BucketedUpdate,
    GradientHub,
    Model,
    OptimizerLink,
    RankContext,
    RemoteOptimizer,
    agree,
    build_model,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    learning_rate,
    mean_per_token,
    micro_batches,
    train_in_one_process,
    update_order,
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
    workers, model = ctx.ranks("worker"), build_model(cfg, ctx)
    optimizer = RemoteOptimizer(model.parameters(), server, ctx=ctx, block=_blocks(cfg, ctx)[ctx.rank], model=model)
    optimizer.receive_weights()  # all workers begin with the optimizer's
    _validate(cfg, ctx, model, server)
    for step in ctx.steps(cfg):
        optimizer.zero_grad()
        losses, tokens = 0.0, 0
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=workers):
            expect = partial(optimizer.expect, index)  # in the last backward pass gradients leave as they get ready
            loss, count = differentiate(model, x_BT, y_BT, masks=model.masks(step, index), before_backward=expect)
            optimizer.accumulate(index, tokens=count, loss=loss)
            losses, tokens = losses + loss, tokens + count
        optimizer.step()  # weights come in; each layer's next forward pass waits for its own
        ctx.report(step, loss=mean_per_token(losses, tokens), tokens=tokens)
        if validation_is_due(cfg, ctx, step):
            _validate(cfg, ctx, model, server)
    optimizer.receive_weights()
    ctx.report_parameters(model.named_parameters())


def aggregator_optimizer(cfg: Config, ctx: RankContext) -> None:
    """Two tiers: average the workers' gradients and update the weights, on one rank."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    ctx.restore(model, optimizer)
    update, hub = BucketedUpdate(optimizer, cfg=cfg, model=model), _hub(cfg, ctx, model)
    hub.send_first_weights()
    _receive_validation(cfg, ctx, ctx.steps_done)
    for step in ctx.steps(cfg):
        loss, tokens = hub.begin_step()
        for bucket in update.step(step, hub.mean_gradients()):
            hub.send_weights(bucket)
        hub.end_step()
        ctx.report(step, loss=loss, tokens=tokens, grad_norm=update.norm, learning_rate=update.rate)
        if validation_is_due(cfg, ctx, step):
            _receive_validation(cfg, ctx, step)
        ctx.checkpoint(step, model, optimizer)
    ctx.report_parameters(model.named_parameters())


def aggregator(cfg: Config, ctx: RankContext) -> None:
    """Three tiers: average the workers' gradients; pass weights on from the optimizer."""
    relay, total_steps = build_model(cfg, ctx), ctx.data(cfg).total_steps
    hub = _hub(cfg, ctx, relay)
    link = OptimizerLink(relay.parameters(), ctx=ctx, optimizer=ctx.sole("optimizer"))
    link.receive_first_weights()
    hub.send_first_weights()
    _receive_validation(cfg, ctx, ctx.steps_done)
    for step in ctx.steps(cfg):
        loss, tokens = hub.begin_step()
        for bucket in hub.mean_gradients():
            link.send_gradient(bucket)
        for bucket in link.weights(update_order(cfg, hub.buckets)):
            hub.send_weights(bucket)
        hub.end_step()
        ctx.report(step, loss=loss, tokens=tokens, learning_rate=learning_rate(cfg, step, total_steps=total_steps))
        if validation_is_due(cfg, ctx, step):
            _receive_validation(cfg, ctx, step)
    ctx.report_parameters(relay.named_parameters())


def optimizer(cfg: Config, ctx: RankContext) -> None:
    """Three tiers: the only rank with optimizer state; it talks to the aggregator alone."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    ctx.restore(model, optimizer)
    update = BucketedUpdate(optimizer, cfg=cfg, model=model)
    link = AggregatorLink(model.parameters(), ctx=ctx, aggregator=ctx.sole("aggregator"))
    link.send_first_weights()
    agree(ctx, ctx.early_stop, source=ctx.sole("aggregator"))
    for step in ctx.steps(cfg):
        for bucket in update.step(step, link.gradients()):  # with clipping, after the last gradient has come
            link.send_weights(bucket)
        link.end_step()
        ctx.report(step, grad_norm=update.norm, learning_rate=update.rate)
        if validation_is_due(cfg, ctx, step):
            agree(ctx, ctx.early_stop, source=ctx.sole("aggregator"))
        ctx.checkpoint(step, model, optimizer)
    ctx.report_parameters(model.named_parameters())


def _blocks(cfg: Config, ctx: RankContext) -> dict[int, range]:
    workers = ctx.ranks("worker")
    return dict(zip(workers, contiguous_blocks(cfg.training_config.micro_batches, len(workers)), strict=True))


def _hub(cfg: Config, ctx: RankContext, model: Model) -> GradientHub:
    megabytes = cfg.multihost_config.bucket_megabytes
    return GradientHub(
        model.parameters(),
        ctx=ctx,
        workers=_blocks(cfg, ctx),
        bucket_megabytes=megabytes,
        followers=ctx.ranks("optimizer"),
    )


def _validate(cfg: Config, ctx: RankContext, model: Model, server: int) -> None:
    """Send the losses of this worker's share, and hear whether training goes on."""
    ctx.send(validation_losses(cfg, ctx, model, among=ctx.ranks("worker")), dest=server, operation="validation")
    agree(ctx, ctx.early_stop, source=server)


def _receive_validation(cfg: Config, ctx: RankContext, step: int) -> None:
    workers, data = ctx.ranks("worker"), ctx.data(cfg)
    losses_V = torch.empty(data.validation_micro_batches, dtype=torch.float64)
    for rank, block in zip(workers, contiguous_blocks(len(losses_V), len(workers)), strict=True):
        ctx.recv(losses_V[block.start : block.stop], source=rank)
    ctx.report_validation(step, losses_V.tolist(), tokens=data.validation_tokens)
    agree(ctx, ctx.early_stop, dests=(*workers, *ctx.ranks("optimizer")))
