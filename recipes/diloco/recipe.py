"""What the recipe of local steps with an outer optimizer is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

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


class DilocoConfig(Section):
    """How often workers agree, and how."""

    every: Annotated[int, Field(ge=1, le=10**6)] = Field(
        10, description="steps from one outer step to the next; the last step of training has one too"
    )
    outer_learning_rate: Annotated[float, Field(gt=0, le=10)] = Field(
        0.7, description="of the outer step: how far to go towards the average; 1: all the way"
    )
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.5, description="Nesterov momentum of the outer step; 0: none; 0.9 in the paper, for hundreds of outer steps"
    )


class Config(TrainingFile):
    """The sections every recipe shares, the outer optimizer, and in how few bytes workers agree."""

    diloco_config: DilocoConfig = DilocoConfig()
    compression_config: CompressionConfig = CompressionConfig()


RECIPE = Recipe(
    summary="Every worker takes steps of its own; an outer optimizer takes one with what they have moved on average.",
    config=Config,
    layouts=[Layout("single", trainer=1), Layout("local_steps", worker=per("multihost_config.num_workers"))],
    flows=[all_pairs("worker")],
    checks=[every_worker_has_a_micro_batch, local_steps_have_no_loss_scale, compression_makes_sense],
    traffic=traffic,
    unread=["multihost_config.pipeline_parallel_config", "loss_scale_config"],
    same_on_resume=["multihost_config.num_workers", "multihost_config.enabled", "diloco_config.every"],
    naive=Naive(
        [Layout("naive", worker=per("multihost_config.num_workers"))], only={"compression_config.kind": "none"}
    ),
    # What a lossy codec still owes would be lost with its worker; an average at an early stop would have no step of its own.
    elastic=Elastic(
        "local_steps",
        only={"compression_config.kind": "none", "training_config.early_stop_patience": None},
        has_local_steps=True,
        agreed_bytes=8,  # weights and the outer momentum
        traffic=traffic,
    ),
)
