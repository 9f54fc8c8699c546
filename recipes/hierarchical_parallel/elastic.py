"""Three tiers whose ranks come and go: what a rank does follows from its place among the members of an epoch.

    place 0: optimizer   <-- mean gradient ------- place 1: aggregator   <-- gradients -- places 2, 3, ...: workers
                         --- "I have it, too" -->                        --- weights -->

The aggregator has every mean gradient first, so it makes the optimizer's update, too, and is its shadow: each of the two has all that the
other one would take with it. When one of them ends, a worker takes its place and gets weights and moments from the one that is left. So
nobody waits for a process to start. Weights come from the aggregator: the same bits, a message of S bytes and a hop less.

    ttlaunch run hierarchical_parallel --elastic 3:6

Shapes: B = sequences in a micro-batch, T = tokens in a sequence.
"""

from collections.abc import Iterable
from functools import partial

from ttlaunch.train import (
    RankContext,
    ShadowedUpdate,
    TrainingLoop,
    build_model,
    build_optimizer,
    differentiate,
    micro_batches,
    report_layer_norms,
    validate_together,
)

from .recipe import Config

_SERVERS, _AGGREGATOR = 2, 1


def member(cfg: Config, ctx: RankContext) -> None:
    """Be optimizer, aggregator or worker, as the place in the epoch says; all end with the parameters of one process."""
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    update = ShadowedUpdate(ctx, model, optimizer, servers=_SERVERS, owners=[_AGGREGATOR])
    ctx.restore(model, optimizer)
    ctx.save_if_abandoned(model, optimizer, has_all=update.has_state)
    validate = partial(validate_together, cfg, ctx, model=model)
    loop = TrainingLoop(cfg, ctx, validate=validate, held=model.named_parameters)
    for step in loop.steps():

        def enter(indices: Iterable[int], step: int = step) -> None:
            for index, x_BT, y_BT in micro_batches(cfg, ctx, step, indices=indices):
                expect = partial(update.expect, index)  # in the last backward pass gradients leave as they get ready
                loss, tokens = differentiate(model, x_BT, y_BT, masks=model.masks(step, index), before_backward=expect)
                update.accumulate(index, tokens=tokens, loss=loss)

        made = update.step(step, enter)
        loop.end_step(step, **made.known)
        if made.known and ctx.rank == 0:
            report_layer_norms(cfg, ctx, optimizer, step)
        if update.is_keeper:
            ctx.checkpoint(step, model, optimizer, owners=ctx.ranks("member")[:1])
    ctx.report_parameters(model.named_parameters())
