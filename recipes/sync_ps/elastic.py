"""Synchronous parameter servers that come and go: what a rank does follows from its place among the members of an epoch.

    one server     place 0: server           place 1: worker, and the server's shadow    others: workers
    two servers    place 0: server of half   place 1: server of the other half           others: workers

                   places 2, 3, ... -- gradients --> the server of each part -- mean --> its shadow
                                    <-- weights ----

A shadow gets the mean of its server's part and makes the same update, so it has the same bits; two servers are each other's shadow. When one of
both ends, a worker takes its place and gets weights and moments from the one that is left. An update begins when both have the whole
mean: then whoever is left has the newest step, or makes it. A step costs the keepers S bytes more than without shadows.

    ttlaunch run sync_ps --elastic 2:5
    ttlaunch run sync_ps --elastic 3:5 --set sync_ps_config.num_servers=2
"""

from functools import partial

from ttlaunch.train import (
    AveragedState,
    RankContext,
    ShadowedUpdate,
    build_model,
    build_optimizer,
    slowed,
    train_with_shadows,
)

from .recipe import Config
from .validation import make_average, validate_among_members


def member(cfg: Config, ctx: RankContext) -> None:
    """Be server, shadow or worker, as the place in the epoch says; all end with the parameters of one process."""
    servers, slow_workers = cfg.sync_ps_config.num_servers, cfg.sync_ps_config.slow_workers
    model = build_model(cfg, ctx)
    optimizer = build_optimizer(cfg, model, total_steps=ctx.data(cfg).total_steps)
    # The server at place 0 has the first layers, whose gradients come last.
    average = make_average(cfg, model)
    state, owners = AveragedState(optimizer, average), list(reversed(range(servers)))
    after_update = None if average is None else average.update
    update = ShadowedUpdate(
        ctx, model, optimizer, servers=servers, owners=owners, state=state, after_update=after_update
    )
    ctx.restore(model, state)
    if average is not None and not ctx.steps_done:
        average.begin()
    validate = partial(validate_among_members, cfg, ctx, model=model, average=average)
    train_with_shadows(
        cfg,
        ctx,
        update,
        model=model,
        optimizer=optimizer,
        state=state,
        validate=validate,
        around=lambda: slowed(slow_workers, ctx.rank - servers),  # the rank changes with the epoch
    )
