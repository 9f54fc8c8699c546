"""An asynchronous parameter server in its plainest form: the server applies gradients one by one as they arrive.

    server -- number of a step, weights --> worker      the worker differentiates that step's data
    server <- mean gradient --------------- worker      the server updates at once; then the worker gets the next step

The more updates have happened since its worker received the weights, the less a gradient counts. A worker waits for every answer,
as `trainer.py` does with `is_ahead: false`; if gradients arrive in the same order, both end with the same bits. `ttlaunch repro`
repeats the order of a run.

    ttlaunch run elastic_dp --naive

Shapes: N = values of all parameters, B = sequences of a micro-batch, T = tokens of a sequence.
Source: J. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012: Downpour SGD with n_fetch = n_push = 1.
"""

import torch

from ttlaunch.train import (
    RankContext,
    begin_task,
    build_model,
    build_optimizer,
    differentiate,
    global_norm,
    micro_batches,
    step_size,
)

from .recipe import Config


def worker(cfg: Config, ctx: RankContext) -> None:
    """Ask for a step, differentiate all of its data, push the gradient; until there is no step left."""
    server, model = ctx.sole("server"), build_model(cfg, ctx)
    sums, task = ctx.gradient_tree(model.weights_N), torch.empty(1, dtype=torch.int64)
    while True:
        ctx.recv(task, source=server)
        if not task.item():
            return
        ctx.recv(model.weights_N, source=server)
        step = int(task.item())
        begin_task(ctx, step)
        for index, x_BT, y_BT in micro_batches(cfg, ctx, step):
            loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index))
            sums.add(index, model.take_gradients(), tokens=tokens, loss=loss)
            model.zero_grad()
        loss, tokens = sums.mean(model.grads_N, micro_batches=cfg.training_config.micro_batches)
        ctx.send(model.grads_N, dest=server)
        model.zero_grad()
        ctx.report(step, loss=loss, tokens=tokens)


def server(cfg: Config, ctx: RankContext) -> None:
    """Update with each gradient when it arrives, and give its worker the newest weights and the next step."""
    workers, model = ctx.ranks("worker"), build_model(cfg, ctx)
    last_step = ctx.data(cfg).total_steps
    optimizer = build_optimizer(cfg, model, total_steps=last_step)
    gradients = {rank: torch.empty_like(model.grads_N) for rank in workers}
    tasks = iter(range(1, last_step + 1))
    versions, pending = {}, {}

    def hand_out(rank: int, task: int) -> None:
        ctx.send(torch.tensor([task]), dest=rank)
        if task:
            ctx.send(model.weights_N, dest=rank)
            versions[rank], pending[rank] = ctx.step, ctx.irecv(gradients[rank], source=rank)

    for rank in workers:
        hand_out(rank, next(tasks, 0))
    for step in ctx.steps(cfg):
        source = ctx.replay[step - 1] if ctx.replay else list(pending)[ctx.wait_any(list(pending.values())) or 0]
        pending.pop(source).wait()
        model.grads_N.copy_(gradients[source])
        staleness = step - 1 - versions[source]
        factor = step_size(staleness, cfg.elastic_dp_config.staleness_rule)
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm, rate_factor=factor)
        ctx.report(step, grad_norm=norm, learning_rate=rate, staleness=staleness, arrived_from=source)
        hand_out(source, next(tasks, 0))
    for rank, message in pending.items():  # a run that was stopped early: these workers still compute
        message.wait()
        hand_out(rank, 0)
    ctx.report_parameters(model.named_parameters())
