"""What the asynchronous parameter server is: its configuration, its roles, who talks to whom. No torch: the launcher reads it."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from ttlaunch.recipe import (
    Bits,
    CompressionConfig,
    Elastic,
    Layout,
    Naive,
    Recipe,
    Section,
    TrainingFile,
    gradients_may_be_stale,
    per,
    pushes_are_compressed,
    slow_workers_are_there,
)

from .traffic import traffic


class ElasticDpConfig(Section):
    """How often workers take new weights, and how much a stale gradient counts."""

    pull_interval: PositiveInt = Field(1, description="gradients that a worker pushes before it takes weights again")
    is_ahead: bool = Field(
        default=True, description="begin a task before weights are there, and take them after its first micro-batch"
    )
    staleness_rule: Literal["inverse", "constant"] = Field(
        "inverse", description="learning rate of a stale gradient: divided by its staleness, or as it is"
    )
    slow_workers: Annotated[dict[NonNegativeInt, Annotated[float, Field(ge=1, le=1000)]], Bits.FREE] = Field(
        default={}, description="for experiments: workers by place, and how many times as long their passes take"
    )


class Config(TrainingFile):
    """The sections every recipe shares, what is asynchronous, and in how few bytes gradients travel."""

    elastic_dp_config: ElasticDpConfig = ElasticDpConfig()
    compression_config: CompressionConfig = CompressionConfig()


def tasks_in_hand(config: Config) -> int:
    """Return how many tasks a worker has at a time: with `is_ahead` also the one after the one that it computes."""
    return 2 if config.elastic_dp_config.is_ahead else 1


RECIPE = Recipe(
    summary="A server applies each gradient when it comes; workers never wait for each other.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("elastic_dp", worker=per("multihost_config.num_workers"), server=1),
    ],
    flows=[("worker", "server")],
    checks=[gradients_may_be_stale, slow_workers_are_there("elastic_dp_config"), pushes_are_compressed],
    unread=["multihost_config.pipeline_parallel_config", "multihost_config.bucket_megabytes"],
    traffic=traffic,
    is_asynchronous=True,
    naive=Naive(
        [Layout("naive", worker=per("multihost_config.num_workers"), server=1)],
        only={"compression_config.kind": "none", "elastic_dp_config.pull_interval": 1},
    ),
    # A server has the first place; what a lossy codec has not sent yet would be lost with its worker.
    elastic=Elastic(
        Layout("members", member=per("multihost_config.num_workers", plus=1)),
        only={"compression_config.kind": "none"},
        servers=1,
        as_roles=["server"],
        tasks_in_hand=tasks_in_hand,
    ),
)
