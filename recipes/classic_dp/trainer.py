"""Data parallelism in which a fast worker need not wait for a slow one at once: bounded staleness.

    worker 0 -- shards --> worker 1 -- shards --> ... --> worker W-1 -- shards --> worker 0

The gradients of a step travel around a ring, 2(W - 1)/W of the weights' size S from each worker to the next. With
`staleness_bound: 0` every worker waits for the mean in the same step. With a bound of K, a worker continues with the weights it
has. It applies the mean of step s when it arrives, at the latest before step s + K + 1 begins, so no worker leads by more than K
steps. This saves waiting if different workers are slow at different times; a worker that is always slower still sets the pace. It
costs buffers for K + 1 steps, 2S each, and gradients are up to K updates old. Old gradients count less (`staleness_damping`).

All workers apply the same means in the order of the steps, so they have the same weights after the same update. With K > 0, the
speed of the workers decides with which weights a gradient was computed. With K = 0 the speed has no influence: gradients are added
along one tree, and the bits are those of one process. Validations and checkpoints wait until all steps so far are applied.

    ttlaunch run classic_dp
    ttlaunch run classic_dp --set classic_dp_config.staleness_bound=0

Shapes: N = values of all parameters in one flat vector, B = sequences in a micro-batch, T = tokens in a sequence,
V = micro-batches of a validation.
Source: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013, for the
bound; Y. Li et al., "Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training", NeurIPS 2018,
for an all-reduce that is applied steps later; W. Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI
2016, for the smaller weight of older gradients.
"""

from collections.abc import Callable, Iterable
from functools import partial

from ttlaunch.train import (
    MeanAroundRing,
    MeanGradients,
    Model,
    Optimizer,
    RankContext,
    TrainingLoop,
    build_model,
    build_optimizer,
    contiguous_blocks,
    differentiate,
    global_norm,
    held_tensors,
    mean_gradients,
    micro_batches,
    repeat_updates,
    train_in_one_process,
    validate_together,
    validation_is_due,
)

from .recipe import Config


def trainer(cfg: Config, ctx: RankContext) -> None:
    """One process has all micro-batches, and nobody to lead; or it makes the updates of a recorded run again."""
    rule = MeanAroundRing(damping=cfg.classic_dp_config.staleness_damping)
    repeat_updates(cfg, ctx, lambda _: rule) if ctx.updates else train_in_one_process(cfg, ctx)


def worker(cfg: Config, ctx: RankContext) -> None:
    """Differentiate a contiguous block of each step's micro-batches, give the gradient away, apply the means that are here."""
    workers, bound = ctx.ranks("worker"), cfg.classic_dp_config.staleness_bound
    is_first = ctx.position("worker") == 0  # in an elastic run the loop knows who reports
    model = build_model(cfg, ctx)  # drawn from the seed: equal everywhere, so nothing is sent
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    means = mean_gradients(
        model,
        ctx=ctx,
        among=workers,
        blocks=contiguous_blocks(cfg.training_config.micro_batches, len(workers)),
        bound=bound,
        damping=cfg.classic_dp_config.staleness_damping,
        bucket_megabytes=cfg.multihost_config.bucket_megabytes,
        is_validated=partial(validation_is_due, cfg, ctx),
    )
    ctx.restore(model, optimizer)
    loop = TrainingLoop(
        cfg,
        ctx,
        validate=partial(validate_together, cfg, ctx, model=model),
        reports=is_first,
        norms=optimizer if is_first else None,
        saved=(model, optimizer),
        owners=workers[:1],  # all workers get the same
        compares=False,  # a worker may lead others by some updates; they are compared after the same update
        applies=bound == 0,
    )
    compare = partial(ctx.compare, held=partial(held_tensors, model, optimizer))
    compare(ctx.steps_done)
    for step in loop.steps():
        means.make(step, partial(_enter, cfg=cfg, ctx=ctx, step=step, model=model, means=means))
        until = step if bound == 0 or _is_looked_at(cfg, ctx, step) else step - bound
        known = _update(means, optimizer, until=until, compare=compare)
        loop.end_step(step, **known)
    means.close()
    if is_first and ctx.elastic is None:  # who comes and goes has not counted all
        for name, value in means.staleness.results().items():
            ctx.result(name, value)
    ctx.report_parameters(model.named_parameters())


def _enter(
    indices: Iterable[int], *, cfg: Config, ctx: RankContext, step: int, model: Model, means: MeanGradients
) -> None:
    """Differentiate micro-batches; messages of this and earlier steps travel meanwhile."""
    for index, x_BT, y_BT in micro_batches(cfg, ctx, step, indices=indices):
        expect = partial(means.expect, index)
        loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index), before_backward=expect)
        means.accumulate(index, tokens=tokens, loss=loss)


def _is_looked_at(cfg: Config, ctx: RankContext, step: int) -> bool:
    """Whether this step is followed by a validation, a checkpoint or a stop, before which all updates have to be applied."""
    interval = cfg.checkpoint_config.interval
    return validation_is_due(cfg, ctx, step) or (interval is not None and step % interval == 0) or ctx.should_stop()


def _update(
    means: MeanGradients, optimizer: Optimizer, *, until: int, compare: Callable[[int], None]
) -> dict[str, float]:
    """Update for every mean that is here, waiting for those of steps up to `until`; says what is known of them together."""
    known: dict[str, float] = {}
    losses, tokens, ages = list[float](), 0, list[int]()
    for mean in means.ready(until=until):
        norm = global_norm(optimizer.squared_norms())  # of the mean, so the same on every worker
        known = {"grad_norm": norm, "learning_rate": optimizer.step(mean.step, norm=norm)}
        compare(mean.step)
        losses, tokens, ages = [*losses, mean.loss], tokens + mean.tokens, [*ages, *mean.staleness]
    if not losses:
        return {}
    return known | {"loss": sum(losses) / len(losses), "tokens": tokens, "staleness": sum(ages) / len(ages)}
