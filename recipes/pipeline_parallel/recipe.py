"""What the pipeline recipe is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    Layout,
    Recipe,
    TrainingFile,
    chain,
    ends,
    every_replica_has_a_micro_batch,
    every_stage_has_a_block,
    in_columns,
    in_rows,
    num_workers_counts_the_stages,
    per,
    the_schedule_fits_the_chunks,
)

from .traffic import REPLICAS, STAGES, closes_the_chain, moves_blocks, traffic

__all__ = ["RECIPE", "STAGES", "Config"]


class Config(TrainingFile):
    """The sections every recipe shares; this one needs no key of its own."""


RANKS = per(STAGES.key, times=REPLICAS.key)


RECIPE = Recipe(
    summary="Each rank has some of the model's blocks; micro-batches flow through all of them.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("pipeline", stage=RANKS),  # replica by replica, each from its first stage to its last
    ],
    flows=[
        chain("stage", row=STAGES),
        ends("stage", row=STAGES, when=closes_the_chain),
        in_rows("stage", row=STAGES, when=moves_blocks),
        in_columns("stage", row=STAGES, when=lambda config: REPLICAS(config) > 1),  # they average their gradients
    ],
    checks=[
        every_stage_has_a_block,
        num_workers_counts_the_stages,
        the_schedule_fits_the_chunks,
        every_replica_has_a_micro_batch,
    ],
    unread=["multihost_config.bucket_megabytes"],
    traffic=traffic,
)
