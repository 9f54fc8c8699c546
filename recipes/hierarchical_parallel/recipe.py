"""What the hierarchical recipe is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    Audited,
    Elastic,
    Layout,
    Naive,
    Recipe,
    TrainingFile,
    devices_have_equal_shares,
    every_worker_has_a_micro_batch,
    in_rows,
    per,
)

from .traffic import RANKS_OF_A_WORKER, members_traffic, shadow_bytes, traffic


class Config(TrainingFile):
    """The sections every recipe shares; this one needs no key of its own."""


WORKERS = per("multihost_config.num_workers", times=RANKS_OF_A_WORKER.key)

RECIPE = Recipe(
    summary="Workers differentiate, an aggregator averages, an optimizer updates the weights.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("two_tier", worker=WORKERS, aggregator_optimizer=1),
        Layout("three_tier", worker=WORKERS, aggregator=1, optimizer=1),
    ],
    flows=[
        ("worker", "aggregator_optimizer"),
        ("worker", "aggregator"),
        ("aggregator", "optimizer"),
        in_rows("worker", row=RANKS_OF_A_WORKER, when=lambda config: RANKS_OF_A_WORKER(config) > 1),
    ],
    checks=[every_worker_has_a_micro_batch, devices_have_equal_shares],
    unread=["multihost_config.pipeline_parallel_config"],
    traffic=traffic,
    naive=Naive(
        [Layout("naive", worker=per("multihost_config.num_workers"), aggregator=1, optimizer=1)],
        only={"device_config.enable_ddp": False, "device_config.enable_tp": False},
    ),
    # Of members of one role, the first two are optimizer and aggregator; each of them keeps what the other one has.
    elastic=Elastic(
        Layout("members", member=per("multihost_config.num_workers", plus=2)),
        only={"device_config.enable_ddp": False, "device_config.enable_tp": False},
        slots=1,
        servers=2,
        as_roles=["optimizer", "aggregator"],
        shadow_bytes=shadow_bytes,
        traffic=members_traffic,
    ),
    audited=Audited("worker", only={"device_config.enable_ddp": False, "device_config.enable_tp": False}),
)
