"""A synchronous parameter server: workers differentiate, servers wait for all of them, average and update.

    worker 0 ... W-1 -- gradient of the step, cut into K parts --> servers 0 ... K-1
    worker 0 ... W-1 <------------ new weights, K parts ---------- servers 0 ... K-1     each has the optimizer of its part

A gradient carries the number of its step, and servers refuse and count a gradient of an older step. With S bytes of weights a
worker sends S for each node of the tree over micro-batches that its block consists of, usually one, and receives S. A server with
1/K of the weights moves 2W/K of S, so more servers help if one is the bottleneck.

A late worker delays all others. With `straggler: drop` a step uses the gradients that came in time: its mean is over their
tokens, and the late worker gets the new weights. `straggler: fail` ends the run and names the worker. With `polyak_interval`
servers also keep the average of the weights, which validations evaluate beside the weights.

    ttlaunch run sync_ps --set sync_ps_config.num_servers=2 --set sync_ps_config.polyak_interval=10

Shapes: B = sequences in a micro-batch, T = tokens in a sequence.
Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; J. Chen et al.,
"Revisiting Distributed Synchronous SGD", ICLR 2016 workshop, for steps without late workers.
"""

from functools import partial

from ttlaunch.train import (
    ParameterServer,
    ParameterServerClient,
    Patience,
    RankContext,
    TrainingLoop,
    build_model,
    build_optimizer,
    build_shard,
    contiguous_blocks,
    differentiated,
    global_norm,
    mean_gradient,
    mean_per_token,
    restore_averaged,
    shared_norm,
    slowed,
    validation_is_due,
)

from .elastic import member  # noqa: F401 - the role of all ranks with `--elastic`
from .recipe import Config
from .validation import evaluate, make_average, receive_validation, send_validation


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process does everything: the reference that workers and servers equal, bit for bit, average and all."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    average = make_average(cfg, model)
    state = restore_averaged(ctx, model, optimizer, average)
    sums = ctx.gradient_tree(model.weights_N)
    validate = partial(evaluate, cfg, ctx, model=model, average=average)
    loop = TrainingLoop(cfg, ctx, validate=validate, norms=optimizer, saved=(model, state))
    for step in loop.steps():
        loss, tokens = mean_gradient(cfg, ctx, step, model=model, sums=sums)
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm)
        if average is not None:
            average.update(step)
        loop.end_step(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    ctx.report_parameters(model.named_parameters())


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate a contiguous block of each step's micro-batches; weights and optimizer are somewhere else."""
    workers, place = ctx.ranks("worker"), ctx.position("worker")
    model = build_model(cfg, ctx)
    sums = ctx.gradient_tree(model.weights_N)
    block = contiguous_blocks(cfg.training_config.micro_batches, len(workers))[place]
    straggler = cfg.sync_ps_config.straggler
    client = ParameterServerClient(ctx, model, block=block, compression=cfg.compression_config, straggler=straggler)
    client.receive_first_weights()
    send_validation(cfg, ctx, model=model, client=client)
    for step in ctx.steps(cfg):
        if step <= client.version:
            continue  # the others made this step while this worker was late
        if client.is_over:
            break
        losses, tokens = 0.0, 0
        with slowed(cfg.sync_ps_config.slow_workers, place):
            for index, loss, count in differentiated(cfg, ctx, step, model, among=workers):
                sums.add(index, model.take_gradients(), tokens=count, loss=loss)
                model.zero_grad()
                losses, tokens = losses + loss, tokens + count
        client.push(step, sums)
        client.pull(sums)
        if ctx.rank in client.members:
            ctx.report(step, loss=mean_per_token(losses, tokens), tokens=tokens)
            if validation_is_due(cfg, ctx, step):
                send_validation(cfg, ctx, model=model, client=client)
        client.checkpoint(step)  # what its codecs owe; all else is with the servers
    ctx.report_parameters(model.named_parameters())


def server(cfg: Config, ctx: RankContext) -> None:
    """Wait for the step's gradients of a part of the parameters, average, update, send the part back."""
    servers, is_first, keys = ctx.ranks("server"), ctx.position("server") == 0, cfg.sync_ps_config
    shard = build_shard(cfg, ctx, among=servers)
    optimizer = build_optimizer(cfg, shard, total_steps=ctx.data(cfg).total_steps)
    average = make_average(cfg, shard)
    state = restore_averaged(ctx, shard, optimizer, average)
    server = ParameterServer(
        ctx,
        shard,
        micro_batches=cfg.training_config.micro_batches,
        patience=Patience(keys.straggler, keys.straggler_timeout_s),
        compression=cfg.compression_config,
    )
    server.send_first_weights()
    validate = partial(receive_validation, cfg, ctx, server=server, average=average)
    loop = TrainingLoop(
        cfg, ctx, validate=validate, reports=is_first, norms=optimizer, saved=(shard, state), owners=server.owners
    )
    for step in loop.steps():
        loss, tokens = server.mean_gradient(step)  # sleeps until all have come, or the late ones are given up
        norm = shared_norm(ctx, optimizer, among=servers)
        rate = optimizer.step(step, norm=norm)
        if average is not None:
            average.update(step)
        server.send_weights(step)
        loop.end_step(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    server.dismiss()
    if is_first and keys.straggler == "drop":
        ctx.result("refused gradients", server.refused)
    ctx.report_parameters(shard.named_parameters())
