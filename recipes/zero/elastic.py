"""The worker of `trainer.py` while others come and go: the members of the run own its slots, and each slot has a shadow.

    worker i --- sums of slot j ---> owner j --- its mean ---> shadow of slot j      owner and shadow make the same update

At stage 0 every worker has everything, and nobody needs a shadow.

    ttlaunch run zero -n 4 --elastic 1:4
"""

from collections.abc import Callable, Iterable
from functools import partial

from ttlaunch.train import (
    ElasticExchange,
    ElasticShards,
    GatheredWeights,
    LayerPasses,
    RankContext,
    ScatteredGradients,
    TrainingLoop,
    audited,
    build_model,
    build_optimizer,
    differentiated,
    global_norm,
    losses_by_layer,
    micro_batches,
    share_validation,
    validate_together,
)

from .recipe import Config

Gradient = Callable[[LayerPasses, GatheredWeights, ScatteredGradients], tuple[float, int]]
"""`_mean_gradient` of `trainer.py`."""


def come_and_go(cfg: Config, ctx: RankContext, gradient: Gradient) -> None:
    """Be one of the members that make the steps, as long as the run needs this worker."""
    if cfg.zero_config.stage:
        shards(cfg, ctx, gradient)
    else:
        replicas(cfg, ctx)


def shards(cfg: Config, ctx: RankContext, gradient: Gradient) -> None:
    """Own a slot and shadow another one."""
    model = build_model(cfg, ctx)
    state = ElasticShards(cfg, ctx, model, zero_stage=cfg.zero_config.stage)

    def validate(step: int) -> None:
        state.publish(step)
        workers = ctx.ranks("worker")
        evaluate = partial(losses_by_layer, cfg, ctx, model, state.weights, among=workers)
        share_validation(cfg, ctx, step, among=workers, evaluate=evaluate)

    def report() -> None:
        state.publish(ctx.step)
        for layer in state.weights.layers:
            state.weights.fetch(layer.index, then=None)
            ctx.report_parameters(state.own.owned.layout.parameters_of(layer, model))

    def mean_gradient(step: int, indices: Iterable[int]) -> tuple[float, int]:
        passes = LayerPasses(model, list(micro_batches(cfg, ctx, step, indices=indices)), step=step)
        with audited(cfg, ctx, step, model=model, weights=state.weights, gradients=state.gradients):
            return gradient(passes, state.weights, state.gradients)

    loop = TrainingLoop(cfg, ctx, validate=validate, norms=state, compares=False, at_end=report)
    for step in loop.steps():
        made = state.make(step, mean_gradient)
        loop.end_step(step, loss=made.loss, tokens=made.tokens, grad_norm=made.norm, learning_rate=state.rate())
        ctx.compare(step, partial(state.held, step))
        ctx.checkpoint(step, state.own.owned, state.own.optimizer, owners=ctx.ranks("worker"))


def replicas(cfg: Config, ctx: RankContext) -> None:
    """Have everything, as the workers of `data_parallel` do."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    workers, count = ctx.ranks("worker"), cfg.training_config.micro_batches
    exchange = ElasticExchange(model.parameters(), ctx=ctx, among=workers, micro_batches=count)
    ctx.restore(model, optimizer)
    validate = partial(validate_together, cfg, ctx, model=model)
    loop = TrainingLoop(cfg, ctx, validate=validate, norms=optimizer, saved=(model, optimizer), owners=workers[:1])

    def enter(step: int, indices: Iterable[int]) -> None:
        for index, loss, tokens in differentiated(cfg, ctx, step, model, indices=indices, expect=exchange.expect):
            exchange.accumulate(index, tokens=tokens, loss=loss)

    for step in loop.steps():
        loss, tokens = exchange.mean(step, partial(enter, step))
        norm = global_norm(optimizer.squared_norms())
        rate = optimizer.step(step, norm=norm)
        loop.end_step(step, loss=loss, tokens=tokens, grad_norm=norm, learning_rate=rate)
    ctx.report_parameters(model.named_parameters())
