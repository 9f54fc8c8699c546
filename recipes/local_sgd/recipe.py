"""What the recipe of local steps is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from typing import Annotated

from pydantic import Field

from ttlaunch.recipe import (
    CompressionConfig,
    Elastic,
    Layout,
    Naive,
    Recipe,
    Section,
    TrainingFile,
    all_pairs,
    compression_makes_sense,
    every_worker_has_a_micro_batch,
    local_steps_have_no_loss_scale,
    per,
)

from .traffic import traffic


class LocalSgdConfig(Section):
    """How often workers agree."""

    every: Annotated[int, Field(ge=1, le=10**6)] = Field(
        8, description="steps from one average of the weights to the next; the last step of training has one too"
    )


class Config(TrainingFile):
    """The sections every recipe shares, how often workers agree, and in how few bytes."""

    local_sgd_config: LocalSgdConfig = LocalSgdConfig()
    compression_config: CompressionConfig = CompressionConfig()


RECIPE = Recipe(
    summary="Every worker takes steps of its own; every so often they average their weights.",
    config=Config,
    layouts=[Layout("single", trainer=1), Layout("local_steps", worker=per("multihost_config.num_workers"))],
    flows=[all_pairs("worker")],
    checks=[every_worker_has_a_micro_batch, local_steps_have_no_loss_scale, compression_makes_sense],
    traffic=traffic,
    unread=["multihost_config.pipeline_parallel_config", "loss_scale_config"],
    same_on_resume=["multihost_config.num_workers", "multihost_config.enabled", "local_sgd_config.every"],
    naive=Naive(
        [Layout("naive", worker=per("multihost_config.num_workers"))], only={"compression_config.kind": "none"}
    ),
    # What a lossy codec still owes would be lost with its worker; an average at an early stop would have no step of its own.
    elastic=Elastic(
        "local_steps",
        only={"compression_config.kind": "none", "training_config.early_stop_patience": None},
        has_local_steps=True,
        agreed_bytes=4,  # weights
        traffic=traffic,
    ),
)
