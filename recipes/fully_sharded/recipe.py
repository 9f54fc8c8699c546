"""What the fully sharded recipe is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from typing import Annotated, Literal

from pydantic import Field

from ttlaunch.recipe import (
    Layout,
    Naive,
    NeedsProcesses,
    Recipe,
    Section,
    TrainingFile,
    all_pairs,
    every_replica_has_as_many_workers,
    every_worker_has_a_micro_batch,
    per,
)

from .traffic import traffic


class FullyShardedConfig(Section):
    """What the workers share instead of each having it whole."""

    shard: Literal["optimizer+gradients", "all"] = Field(
        "all", description="all: weights too are gathered for each pass; else they stay from forward to backward pass"
    )
    replicas: Annotated[int, Field(ge=1, le=10**6)] = Field(
        1, description="times that all parameters are there; the workers of each replica share them"
    )


class Config(TrainingFile):
    """The sections every recipe shares, and what is sharded."""

    fully_sharded_config: FullyShardedConfig = FullyShardedConfig()


RECIPE = Recipe(
    summary="Workers share weights, gradients and optimizer state; each block is gathered when it computes.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("fully_sharded", worker=per("multihost_config.num_workers")),
    ],
    flows=[all_pairs("worker")],
    checks=[every_worker_has_a_micro_batch, every_replica_has_as_many_workers],
    traffic=traffic,
    needs_processes=[
        NeedsProcesses("multihost_config.enabled", value=True, instead=False, because="workers share torch's group")
    ],
    unread=["multihost_config.pipeline_parallel_config", "multihost_config.bucket_megabytes"],
    naive=Naive(
        [Layout("naive", worker=per("multihost_config.num_workers"))],
        only={"transformer_config.tie_embeddings": False, "fully_sharded_config.replicas": 1},
    ),
    elastic="torch shares the weights in a process group, which cannot lose a rank",
)
