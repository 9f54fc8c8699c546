"""What the pipeline recipe is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    Layout,
    Recipe,
    TrainingFile,
    chain,
    every_stage_has_a_block,
    num_workers_counts_the_stages,
    per,
)


class Config(TrainingFile):
    """The sections every recipe shares; this one needs no key of its own."""


RECIPE = Recipe(
    summary="Each rank has some of the model's blocks; micro-batches flow through all of them.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("pipeline", stage=per("multihost_config.pipeline_parallel_config.blocks_per_rank")),
    ],
    flows=[chain("stage")],
    checks=[every_stage_has_a_block, num_workers_counts_the_stages],
)
