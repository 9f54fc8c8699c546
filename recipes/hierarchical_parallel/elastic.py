"""Three tiers whose ranks come and go: what a rank does follows from its place among the members of an epoch.

    place 0: optimizer   <-- mean gradient ------- place 1: aggregator   <-- gradients -- places 2, 3, ...: workers
                         --- "I have it, too" -->                        --- weights -->

The aggregator has every mean gradient first, so it makes the optimizer's update, too, and is its shadow: each of the two has all that the
other one would take with it. When one of them ends, a worker takes its place and gets weights and moments from the one that is left. So
nobody waits for a process to start. Weights come from the aggregator: the same bits, a message of S bytes and a hop less.

    ttlaunch run hierarchical_parallel --elastic 3:6
"""

from functools import partial

from ttlaunch.train import (
    RankContext,
    ShadowedUpdate,
    build_model,
    build_optimizer,
    train_with_shadows,
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
    validate = partial(validate_together, cfg, ctx, model=model)
    train_with_shadows(cfg, ctx, update, model=model, optimizer=optimizer, state=optimizer, validate=validate)
