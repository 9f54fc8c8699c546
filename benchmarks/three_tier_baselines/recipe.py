"""What `benchmarks/three_tier.py` measures the three tiers against: no messages at all, and the messages one writes first."""

from typing import ClassVar, Literal

from pydantic import Field

from ttlaunch.recipe import Layout, Recipe, Section, TrainingFile, per


class BaselineConfig(Section):
    """What the ranks exchange."""

    noun: ClassVar[str] = "baseline_config"

    exchange: Literal["none", "naive"] = Field(
        "none", description="none: workers only differentiate; naive: a blocking message for each parameter"
    )


class Config(TrainingFile):
    """The sections every recipe shares, and what is exchanged."""

    baseline_config: BaselineConfig = BaselineConfig()


RECIPE = Recipe(
    summary="Three tiers with naive messages, or with none.",
    config=Config,
    layouts=[Layout("three_tier", worker=per("multihost_config.num_workers"), aggregator=1, optimizer=1)],
    flows=[("worker", "aggregator"), ("aggregator", "optimizer")],
    unread=["multihost_config.bucket_megabytes", "multihost_config.pipeline_parallel_config"],
)
