"""What the hierarchical recipe is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from ttlaunch.recipe import Layout, Recipe, TrainingFile, every_worker_has_a_micro_batch, per


class Config(TrainingFile):
    """The sections every recipe shares; this one needs no key of its own."""


RECIPE = Recipe(
    summary="Workers differentiate, an aggregator averages, an optimizer updates the weights.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("two_tier", worker=per("multihost_config.num_workers"), aggregator_optimizer=1),
        Layout("three_tier", worker=per("multihost_config.num_workers"), aggregator=1, optimizer=1),
    ],
    flows=[
        ("worker", "aggregator_optimizer"),
        ("worker", "aggregator"),
        ("aggregator", "optimizer"),
    ],
    checks=[every_worker_has_a_micro_batch],
    unread=["multihost_config.pipeline_parallel_config"],
)
