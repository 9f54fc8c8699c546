"""What the pipeline recipe is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from ttlaunch.recipe import (
    Layout,
    Naive,
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
    stages_have_equal_shares,
    the_schedule_fits_the_chunks,
)

from .traffic import REPLICAS, SHARES, STAGES, WIDTH, closes_the_chain, moves_blocks, traffic

__all__ = ["RECIPE", "SHARES", "STAGES", "Config"]


class Config(TrainingFile):
    """The sections every recipe shares; this one needs no key of its own."""


RANKS = per(STAGES.key, times=[SHARES.key, REPLICAS.key])

RECIPE = Recipe(
    summary="Each rank has some of the model's blocks; micro-batches flow through all of them.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("pipeline", stage=RANKS),  # replica by replica, each stage by stage
    ],
    flows=[
        chain("stage", row=WIDTH, stride=SHARES),
        ends("stage", row=WIDTH, stride=SHARES, when=closes_the_chain),
        in_rows("stage", row=WIDTH, stride=SHARES, when=moves_blocks),
        in_rows("stage", row=SHARES, when=lambda config: SHARES(config) > 1),  # they split a stage's matrices
        in_columns("stage", row=WIDTH, when=lambda config: REPLICAS(config) > 1),  # they average their gradients
    ],
    checks=[
        every_stage_has_a_block,
        num_workers_counts_the_stages,
        the_schedule_fits_the_chunks,
        every_replica_has_a_micro_batch,
        stages_have_equal_shares,
    ],
    unread=["multihost_config.bucket_megabytes"],
    traffic=traffic,
    naive=Naive(
        [Layout("naive", stage=per(STAGES.key))],
        only={REPLICAS.key: 1, SHARES.key: 1, "transformer_config.tie_embeddings": False},
    ),
    elastic="each stage holds blocks that nobody else has",
)
