"""An asynchronous parameter server whose workers come and go: the first member is the server, all others are workers.

    worker -- gradient, task, versions of its weights --> server -- next tasks, now and then weights --> worker

Tasks of a worker that ends are handed out again, to workers that ask for one; nobody waits for its successor. A worker that comes
gets weights and tasks from the server. Every task is applied exactly once. The server exists once: when it ends, the run does, and
`--resume` goes on from the newest checkpoint. The server records the task of each update and the versions of the weights
that it was computed with, and `ttlaunch repro` makes these updates again in one process.

    ttlaunch run elastic_dp --elastic 2:4

Shapes: B = sequences in a micro-batch, T = tokens in a sequence.
"""

from ttlaunch.train import (
    ElasticTaskClient,
    ElasticTaskServer,
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
    parts_of,
    slowed,
    step_size,
)

from .recipe import Config


def member(cfg: Config, ctx: RankContext) -> None:
    """Be the server or a worker for life: the server's number is the smallest, so it has the first place in every epoch."""
    assert ctx.elastic is not None  # noqa: S101 - only elastic runs have this role
    number = ctx.elastic.own.number
    if number == 0:
        _serve(cfg, ctx)
    else:
        _work(cfg, ctx, number)


def _work(cfg: Config, ctx: RankContext, number: int) -> None:
    """Differentiate whole steps' data with the weights that are here, and push the gradients."""
    keys, count = cfg.elastic_dp_config, cfg.training_config.micro_batches
    model = build_model(cfg, ctx)
    ctx.data(cfg)
    sums = ctx.gradient_tree(model.weights_N)
    client = ElasticTaskClient(ctx, model, pull_interval=keys.pull_interval, is_ahead=keys.is_ahead)
    client.register()
    while task := client.next_task():
        begin_task(ctx, task)
        with slowed(keys.slow_workers, number - 1):
            for index, x_BT, y_BT in micro_batches(cfg, ctx, task, indices=client.each(count)):
                loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(task, index))
                sums.add(index, model.take_gradients(), tokens=tokens, loss=loss)
                model.zero_grad()
                client.advance()
        loss, tokens = sums.mean(model.grads_N, micro_batches=count)
        client.push(task, loss=loss, tokens=tokens)
        ctx.report(task, loss=loss, tokens=tokens)
    client.stay()
    ctx.result(f"idle share of worker {number}", round(client.idle_share, 4))


def _serve(cfg: Config, ctx: RankContext) -> None:
    """Apply each gradient when it comes; evaluate while none does, and sleep when there is nothing left to evaluate."""
    model, total_steps = build_model(cfg, ctx), ctx.data(cfg).total_steps
    optimizer = build_optimizer(cfg, model, total_steps=total_steps)
    tasks = TaskList(done=ctx.steps_done, last=total_steps)
    state = TaskedState(optimizer, tasks)
    server = ElasticTaskServer(ctx, model, tasks)
    ctx.restore(model, state, is_given=False)
    validation, counts = SnapshotValidation(cfg, ctx, model), StalenessCounts()
    loop = TrainingLoop(
        cfg,
        ctx,
        validate=validation.begin,
        norms=optimizer,
        saved=(model, state),
        owners=ctx.ranks("member")[:1],
        at_end=server.dismiss,
    )
    for step in loop.steps():
        source, push = server.next_push(meanwhile=validation.advance)
        staleness = step - 1 - push.version
        ctx.report_update(step, task=push.task, parts=parts_of(push, micro_batches=cfg.training_config.micro_batches))
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm, rate_factor=step_size(staleness, cfg.elastic_dp_config.staleness_rule))
        server.answer(source, push)
        counts.add(staleness)
        measured = {"loss": push.loss, "tokens": push.tokens, "grad_norm": norm, "learning_rate": rate}
        loop.end_step(step, **measured, staleness=staleness, data_step=push.task, arrived_from=source)
    validation.finish()
    ctx.result("staleness average", round(counts.average, 3))
    ctx.result("staleness histogram", counts.histogram())
    ctx.result("tasks handed out again", server.handed_out_again)
    ctx.result("gradients of closed tasks", server.dropped)
    ctx.report_parameters(model.named_parameters())
