"""What the data-parallel recipe is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from typing import Literal

from pydantic import Field

from ttlaunch.recipe import (
    Audited,
    CompressionConfig,
    Elastic,
    Layout,
    Naive,
    NeedsProcesses,
    Recipe,
    Section,
    TrainingFile,
    all_pairs,
    compression_makes_sense,
    every_worker_has_a_micro_batch,
    per,
)

from .traffic import traffic


class DataParallelConfig(Section):
    """How the workers agree on a gradient."""

    reduction: Literal["canonical", "fast"] = Field(
        "canonical", description="canonical: the bits of one process; fast: torch's DistributedDataParallel"
    )


class Config(TrainingFile):
    """The sections every recipe shares, how gradients are added, and in how few bytes they travel."""

    data_parallel_config: DataParallelConfig = DataParallelConfig()
    compression_config: CompressionConfig = CompressionConfig()


RECIPE = Recipe(
    summary="Every worker has the whole model; they average their gradients and update alike.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("data_parallel", worker=per("multihost_config.num_workers")),
    ],
    flows=[all_pairs("worker")],
    checks=[every_worker_has_a_micro_batch, compression_makes_sense],
    traffic=traffic,
    needs_processes=[
        NeedsProcesses("data_parallel_config.reduction", "fast", "canonical", "is torch's, over a process group")
    ],
    unread=["multihost_config.pipeline_parallel_config"],
    naive=Naive(
        [Layout("naive", worker=per("multihost_config.num_workers"))],
        only={"data_parallel_config.reduction": "canonical", "compression_config.kind": "none"},
    ),
    # torch's group cannot lose a rank, and what a lossy codec still owes would be lost with its rank.
    elastic=Elastic(
        "data_parallel",
        only={"data_parallel_config.reduction": "canonical", "compression_config.kind": "none"},
        kept_bytes=4,  # the mean gradient, beside the gradients that the next step overwrites
        traffic=traffic,
    ),
    audited=Audited("worker", only={"data_parallel_config.reduction": "canonical", "compression_config.kind": "none"}),
)
