"""A synchronous parameter server: workers differentiate, servers wait for all of them, average and update.

    worker 0 ... W-1 -- gradient of the step, cut into K parts --> servers 0 ... K-1
    worker 0 ... W-1 <------------ new weights, K parts ---------- servers 0 ... K-1     each has the optimizer of its part

Every gradient carries the step that it is of, and a step is made of that step's gradients only: a stale one is refused and
counted. With S bytes of weights a worker sends S (once more for each further node of the tree that its block makes) and
gets S back; a server with 1/K of the weights moves 2W/K of S, so servers are added where one is the bottleneck.
`hierarchical_parallel` is the same with buckets that travel during the backward pass, and without anything below.

Whoever is late holds everybody up, unless `straggler: drop` makes the step of what came in time: the mean is then over the
tokens that came, and the late one is brought up to date. `straggler: fail` ends the run and names it.

With `polyak_interval` servers keep the average of the weights too, which validations evaluate beside the weights.

    ttlaunch run sync_ps
    ttlaunch run sync_ps --set sync_ps_config.num_servers=2 --set sync_ps_config.polyak_interval=10

Shapes: B = sequences in a micro-batch, T = tokens in a sequence.
Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; J. Chen et al.,
"Revisiting Distributed Synchronous SGD", ICLR 2016 workshop, for steps without the late ones.
"""

from ttlaunch.train import (
    Model,
    ParameterServer,
    ParameterServerClient,
    ParameterShard,
    Patience,
    PolyakAverage,
    RankContext,
    build_model,
    build_optimizer,
    build_shard,
    contiguous_blocks,
    differentiate,
    global_norm,
    mean_per_token,
    micro_batches,
    report_layer_norms,
    restore_averaged,
    shared_norm,
    slowed,
    validation_is_due,
)

from .recipe import Config
from .validation import evaluate, receive_validation, send_validation


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process does everything: the reference that workers and servers equal, bit for bit, average and all."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    average = _make_average(cfg, model)
    state = restore_averaged(ctx, model, optimizer, average)
    sums = ctx.gradient_tree(model.weights_N)
    evaluate(cfg, ctx, model, average)
    for step in ctx.steps(cfg):
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            sums.add(index, model.take_gradients(), tokens=tokens, loss=loss)
            model.zero_grad()
        mean_loss, tokens = sums.mean(model.grads_N, micro_batches=cfg.training_config.micro_batches)
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm)
        if average is not None:
            average.update(step)
        ctx.report(step, loss=mean_loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
        if validation_is_due(cfg, ctx, step):
            evaluate(cfg, ctx, model, average)
        report_layer_norms(cfg, ctx, optimizer, step)
        ctx.checkpoint(step, model, state)
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
    send_validation(cfg, ctx, model, client)
    for step in ctx.steps(cfg):
        if step <= client.version:
            continue  # the others made this step while this worker was late
        if client.is_over:
            break
        losses, tokens = 0.0, 0
        with slowed(cfg.sync_ps_config.slow_workers, place):
            for index, x_BT, y_BT in micro_batches(cfg, ctx, step, among=workers):
                loss, count = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
                sums.add(index, model.take_gradients(), tokens=count, loss=loss)
                model.zero_grad()
                losses, tokens = losses + loss, tokens + count
        client.push(step, sums)
        client.pull(sums)
        if ctx.rank in client.members:
            ctx.report(step, loss=mean_per_token(losses, tokens), tokens=tokens)
            if validation_is_due(cfg, ctx, step):
                send_validation(cfg, ctx, model, client)
        client.checkpoint(step)  # what its codecs owe; all else is with the servers
    ctx.report_parameters(model.named_parameters())


def server(cfg: Config, ctx: RankContext) -> None:
    """Wait for the step's gradients of a part of the parameters, average, update, send the part back."""
    servers, keys = ctx.ranks("server"), cfg.sync_ps_config
    shard = build_shard(cfg, ctx, among=servers)
    optimizer = build_optimizer(cfg, shard, total_steps=ctx.data(cfg).total_steps)
    average = _make_average(cfg, shard)
    state = restore_averaged(ctx, shard, optimizer, average)
    server = ParameterServer(
        ctx,
        shard,
        micro_batches=cfg.training_config.micro_batches,
        patience=Patience(keys.straggler, keys.straggler_timeout_s),
        compression=cfg.compression_config,
    )
    server.send_first_weights()
    receive_validation(cfg, ctx, server, average)
    for step in ctx.steps(cfg):
        loss, tokens = server.mean_gradient(step)  # sleeps until all have come, or the late ones are given up
        norm = shared_norm(ctx, optimizer, among=servers)
        rate = optimizer.step(step, norm=norm)
        if average is not None:
            average.update(step)
        server.send_weights(step)
        if ctx.rank == servers[0]:
            ctx.report(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
        else:
            ctx.report(step)
        if validation_is_due(cfg, ctx, step):
            receive_validation(cfg, ctx, server, average)
        report_layer_norms(cfg, ctx, optimizer, step)
        ctx.checkpoint(step, shard, state, owners=server.owners)
    server.dismiss()
    if ctx.rank == servers[0] and keys.straggler == "drop":
        ctx.result("refused gradients", server.refused)
    ctx.report_parameters(shard.named_parameters())


def _make_average(cfg: Config, model: Model | ParameterShard) -> PolyakAverage | None:
    keys = cfg.sync_ps_config
    if keys.polyak_interval is None:
        return None
    return PolyakAverage(model, interval=keys.polyak_interval, decay=keys.polyak_decay)
