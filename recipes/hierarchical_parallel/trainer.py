"""Three tiers: workers differentiate, an aggregator averages their gradients, an optimizer updates the weights.

    workers 0..W-1 -- gradients --> aggregator -- mean gradient --> optimizer
    workers 0..W-1 <-- weights ---- aggregator <---- weights ------ optimizer

Only the optimizer keeps Adam's moments; a worker keeps the weights, one gradient and a few partial sums. The price is traffic: with S
bytes of weights a worker moves 2S in a step, and the aggregator 2(W + 1)S. With two tiers, where one rank aggregates and updates,
that rank moves 2S less, and messages have one hop less. Gradients travel in buckets during the last backward pass, and weights come back bucket by bucket, so the next forward pass
begins with the first layer's. If the norm is clipped, updates wait for the last bucket.

    ttlaunch run hierarchical_parallel --on 5loudboxes -c train.yaml

Shapes: B = sequences in a micro-batch, T = tokens in a sequence.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; here updates wait for all workers.
"""

from functools import partial

from ttlaunch.train import (
    AggregatorToOptimizer,
    BucketedUpdate,
    OptimizerToAggregator,
    RankContext,
    RemoteOptimizer,
    TrainingLoop,
    agree,
    build_aggregator,
    build_model,
    build_optimizer,
    differentiated,
    learning_rate,
    mean_per_token,
    own_group,
    ranks_of_share,
    receive_validation,
    send_validation,
    train_in_one_process,
    update_order,
)

from .elastic import member  # noqa: F401 - the role of all ranks with `--elastic`
from .recipe import Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process does everything: the reference that the tiers equal, bit for bit."""
    train_in_one_process(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate a contiguous block of each step's micro-batches; the optimizer is somewhere else."""
    aggregators = ctx.ranks("aggregator") or ctx.ranks("aggregator_optimizer")
    group = own_group(cfg, ctx)  # with `enable_ddp` or `enable_tp` a worker has several ranks
    model = build_model(cfg, ctx, share=group.share_of(ctx))
    server, block = group.server_of(ctx.rank, aggregator=aggregators[0]), group.block_of(ctx.rank)
    members = group.members_of(ctx.rank)
    optimizer = RemoteOptimizer(
        model.parameters(), server, ctx=ctx, block=block, model=model, members=members, shared=model.loss_scaler
    )
    optimizer.receive_weights()  # all workers begin with the optimizer's
    held = partial(optimizer.received, model)
    loop = TrainingLoop(cfg, ctx, validate=lambda _: send_validation(cfg, ctx, model, dest=server), held=held)
    for step in loop.steps():
        optimizer.zero_grad()
        losses, tokens = 0.0, 0
        among = ranks_of_share(cfg, ctx)
        # In the last backward pass gradients leave as they get ready.
        passes = differentiated(cfg, ctx, step, model, among=among, expect=optimizer.expect)
        for index, loss, count in passes:
            optimizer.accumulate(index, tokens=count, loss=loss)
            losses, tokens = losses + loss, tokens + count
        optimizer.step()  # weights come in; each layer's next forward pass waits for its own
        loop.end_step(step, loss=mean_per_token(losses, tokens), tokens=tokens)
    ctx.report_parameters(held())


def aggregator_optimizer(cfg: Config, ctx: RankContext) -> None:
    """Two tiers: average the workers' gradients and update the weights, on one rank."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    ctx.restore(model, optimizer)
    update, aggregator = BucketedUpdate(optimizer, cfg=cfg, model=model), build_aggregator(cfg, ctx, model)
    aggregator.send_first_weights()
    validate = partial(receive_validation, cfg, ctx)
    loop = TrainingLoop(cfg, ctx, validate=validate, norms=optimizer, saved=(model, optimizer))
    for step in loop.steps():
        loss, tokens = aggregator.begin_step()
        for bucket in update.step(step, aggregator.mean_gradients()):
            aggregator.send_weights(bucket)
        aggregator.end_step()
        loop.end_step(step, loss=loss, tokens=tokens, grad_norm=update.norm, learning_rate=update.rate)
    ctx.report_parameters(model.named_parameters())


def aggregator(cfg: Config, ctx: RankContext) -> None:
    """Three tiers: average the workers' gradients; pass weights on from the optimizer."""
    relay, total_steps = build_model(cfg, ctx), ctx.data(cfg).total_steps
    aggregator = build_aggregator(cfg, ctx, relay)
    link = AggregatorToOptimizer(relay.parameters(), ctx=ctx, optimizer=ctx.sole("optimizer"), shared=relay.loss_scaler)
    link.receive_first_weights()
    aggregator.send_first_weights()
    loop = TrainingLoop(cfg, ctx, validate=partial(receive_validation, cfg, ctx), held=relay.named_parameters)
    for step in loop.steps():
        loss, tokens = aggregator.begin_step()
        for bucket in aggregator.mean_gradients():
            link.send_gradient(bucket)
        for bucket in link.weights(update_order(cfg, aggregator.buckets)):
            aggregator.send_weights(bucket)
        aggregator.end_step()
        loop.end_step(step, loss=loss, tokens=tokens, learning_rate=learning_rate(cfg, step, total_steps=total_steps))
    ctx.report_parameters(relay.named_parameters())


def optimizer(cfg: Config, ctx: RankContext) -> None:
    """Three tiers: the only rank with optimizer state; it talks to the aggregator alone."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    ctx.restore(model, optimizer)
    update = BucketedUpdate(optimizer, cfg=cfg, model=model)
    aggregator = ctx.sole("aggregator")
    link = OptimizerToAggregator(model.parameters(), ctx=ctx, aggregator=aggregator, shared=model.loss_scaler)
    link.send_first_weights()
    hear = partial(agree, ctx, ctx.early_stop, source=aggregator)  # whether training goes on
    loop = TrainingLoop(cfg, ctx, validate=lambda _: hear(), norms=optimizer, saved=(model, optimizer))
    for step in loop.steps():
        for bucket in update.step(step, link.gradients()):  # with clipping, after the last gradient has come
            link.send_weights(bucket)
        link.end_step()
        loop.end_step(step, grad_norm=update.norm, learning_rate=update.rate)
    ctx.report_parameters(model.named_parameters())
