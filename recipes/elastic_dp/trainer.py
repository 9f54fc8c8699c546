"""An asynchronous parameter server: a worker pushes each gradient when it is ready, and waits for no other worker.

    worker 0 -- gradient, version of its weights --> server -- next task, now and then weights --> worker 0
    worker 1 -- gradient, ... --------------------->   |    -- ... -------------------------------> worker 1

A task is the data of one step. The server hands out the tasks in order, so the run uses the same samples as one process, each
once; a fast worker does more tasks than a slow one. The server makes one update for each gradient, as soon as it arrives. By then,
other gradients have changed the weights that it was computed with. The gradient names the version of these weights; the
server accepts any version and divides the learning rate by the staleness, which is about W - 1. With `is_ahead`, a worker
does not wait for the server's answer either: it begins its next task at once, and receives new weights after the first
micro-batch.

The technique removes all waiting and saves nothing else. Its price is staleness, and that two runs differ in the order in which
gradients arrive. The records contain this order; `ttlaunch repro` repeats it and ends with the same bits.

    ttlaunch run elastic_dp
    ttlaunch run elastic_dp --set multihost_config.num_workers=3 --set 'elastic_dp_config.slow_workers={0: 3}'
    ttlaunch repro latest

Shapes: B = sequences in a micro-batch, T = tokens in a sequence.
Source: J. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (Downpour SGD); the step size is that of W. Zhang
et al., "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016.
"""

from functools import partial

from ttlaunch.train import (
    AsyncParameterServer,
    AsyncParameterServerClient,
    MeanAlongTree,
    RankContext,
    SnapshotValidation,
    StalenessCounts,
    TaskedState,
    TaskList,
    TrainingLoop,
    begin_task,
    build_model,
    build_optimizer,
    differentiate,
    global_norm,
    micro_batches,
    repeat_updates,
    slowed,
    step_size,
    train_in_one_process,
)

from .elastic import member  # noqa: F401 - the role of all ranks with `--elastic`
from .recipe import Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process: what a single worker that waits for each answer equals, bit for bit; or the updates of a recorded elastic run."""
    factor = partial(step_size, rule=cfg.elastic_dp_config.staleness_rule)
    if ctx.updates:
        repeat_updates(cfg, ctx, lambda model: MeanAlongTree(ctx.gradient_tree(model.weights_N), step_size=factor))
    else:
        train_in_one_process(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate whole steps' data with the weights that are here, and push the gradients."""
    keys, place = cfg.elastic_dp_config, ctx.position("worker")
    model = build_model(cfg, ctx)
    sums = ctx.gradient_tree(model.weights_N)
    client = AsyncParameterServerClient(
        ctx,
        model,
        pull_interval=keys.pull_interval,
        is_ahead=keys.is_ahead,
        compression=cfg.compression_config,
    )
    client.register()
    while task := client.next_task():
        begin_task(ctx, task)
        with slowed(keys.slow_workers, place):
            for index, x_BT, y_BT in micro_batches(cfg, ctx, task):
                loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(task, index))
                sums.add(index, model.take_gradients(), tokens=tokens, loss=loss)
                model.zero_grad()
                client.advance()
        loss, tokens = sums.mean(model.grads_N, micro_batches=cfg.training_config.micro_batches)
        client.push(task, loss=loss, tokens=tokens)
        ctx.report(task, loss=loss, tokens=tokens)
    ctx.result(f"idle share of rank {ctx.rank}", round(client.idle_share, 4))


def server(cfg: Config, ctx: RankContext) -> None:
    """Apply each gradient when it comes; evaluate while none does, and sleep when there is nothing left to evaluate."""
    model, total_steps = build_model(cfg, ctx), ctx.data(cfg).total_steps
    optimizer = build_optimizer(cfg, model, total_steps=total_steps)
    tasks = TaskList(done=ctx.steps_done, last=total_steps)
    state = TaskedState(optimizer, tasks)
    ctx.restore(model, state)
    server = AsyncParameterServer(ctx, model, tasks, compression=cfg.compression_config)
    validation, counts = SnapshotValidation(cfg, ctx, model), StalenessCounts()
    server.register_workers()
    loop = TrainingLoop(cfg, ctx, validate=validation.begin, norms=optimizer, saved=(model, state))
    for step in loop.steps():
        source, push = server.next_push(meanwhile=validation.advance)
        staleness = step - 1 - push.version
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm, rate_factor=step_size(staleness, cfg.elastic_dp_config.staleness_rule))
        server.answer(source, push, version=step)
        counts.add(staleness)
        measured = {"loss": push.loss, "tokens": push.tokens, "grad_norm": norm, "learning_rate": rate}
        loop.end_step(step, **measured, staleness=staleness, data_step=push.task, arrived_from=source)
    server.dismiss()
    validation.finish()
    ctx.result("staleness average", round(counts.average, 3))
    ctx.result("staleness maximum", counts.maximum)
    ctx.result("staleness histogram", counts.histogram())
    ctx.report_parameters(model.named_parameters())
