"""What the ZeRO recipe is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from typing import Annotated

from pydantic import Field

from ttlaunch.recipe import (
    Audited,
    Elastic,
    Layout,
    Naive,
    Recipe,
    Section,
    TrainingFile,
    all_pairs,
    every_worker_has_a_micro_batch,
    per,
)

from .traffic import kept_bytes, members_traffic, shadow_bytes, traffic


class ZeroConfig(Section):
    """What the workers share instead of keeping it whole."""

    stage: Annotated[int, Field(ge=0, le=3)] = Field(
        3,
        description="what ranks share instead of keeping it whole: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too",
    )


class Config(TrainingFile):
    """The sections every recipe shares, and how far the workers share the model."""

    zero_config: ZeroConfig = ZeroConfig()


RECIPE = Recipe(
    summary="Workers share optimizer state, gradients and parameters; layers are gathered when they are needed.",
    config=Config,
    layouts=[Layout("single", trainer=1), Layout("zero", worker=per("multihost_config.num_workers"))],
    flows=[all_pairs("worker")],
    checks=[every_worker_has_a_micro_batch],
    traffic=traffic,
    unread=["multihost_config.pipeline_parallel_config", "multihost_config.bucket_megabytes"],
    naive=Naive(
        [Layout("naive", worker=per("multihost_config.num_workers"))], only={"transformer_config.tie_embeddings": False}
    ),
    # Each worker owns a part of the state and shadows that of another one; at stage 0 all have all of it.
    elastic=Elastic("zero", slots=0, shadow_bytes=shadow_bytes, kept_bytes=kept_bytes, traffic=members_traffic),
    audited=Audited("worker", only={"zero_config.stage": (2, 1, 0)}),  # at stage 3 nobody has a whole model
)
