"""Declares data parallelism with bounded staleness: configuration, roles, who talks to whom. No torch: the launcher imports it."""

from typing import Annotated

from pydantic import Field

from ttlaunch.recipe import (
    Elastic,
    Layout,
    Naive,
    Recipe,
    Section,
    TrainingFile,
    all_pairs,
    every_worker_has_a_micro_batch,
    messages_of_several_steps_overtake,
    per,
)

from .traffic import kept_bytes, members_traffic, traffic


class ClassicDpConfig(Section):
    """How far workers may drift apart, and how much less a stale gradient counts."""

    staleness_bound: Annotated[int, Field(ge=0, le=100)] = Field(
        2,
        description="steps by which the fastest worker may lead the slowest; 0: none, which gives the bits of one process",
    )
    staleness_damping: Annotated[float, Field(ge=0, le=10)] = Field(
        1.0,
        description="in the mean, a gradient that is s updates old has weight 1 / (1 + this times s); 0: always 1",
    )


class Config(TrainingFile):
    """The sections every recipe shares, and how far workers may drift apart."""

    classic_dp_config: ClassicDpConfig = ClassicDpConfig()


def clock_gap(config: Config) -> int:
    """Return by how many steps the fastest worker may lead the slowest."""
    return config.classic_dp_config.staleness_bound


RECIPE = Recipe(
    summary="Workers average gradients around a ring; the fastest may lead the slowest by a bounded number of steps.",
    config=Config,
    layouts=[Layout("single", trainer=1), Layout("ring", worker=per("multihost_config.num_workers"))],
    flows=[all_pairs("worker")],
    checks=[every_worker_has_a_micro_batch, messages_of_several_steps_overtake],
    traffic=traffic,
    unread=["multihost_config.pipeline_parallel_config"],
    naive=Naive([Layout("naive", worker=per("multihost_config.num_workers"))]),
    elastic=Elastic("ring", clock_gap=clock_gap, kept_bytes=kept_bytes, traffic=members_traffic),
)
