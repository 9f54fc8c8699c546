"""What the tensor-parallel recipe is: its configuration, its roles, who talks to whom. No torch here: the launcher reads it."""

from typing import Annotated, ClassVar

from pydantic import Field

from ttlaunch.recipe import (
    Bits,
    Layout,
    Naive,
    Recipe,
    Section,
    TrainingFile,
    in_columns,
    in_rows,
    per,
    split_models_fit,
)

from .traffic import RANKS, REPLICAS, traffic

Positive = Annotated[int, Field(ge=1, le=10**6)]


class TensorParallelConfig(Section):
    """How ranks are arranged: the ranks of one model split its matrices, models share the micro-batches of a step."""

    marks: ClassVar[tuple[Bits, ...]] = (Bits.FREE,)

    ranks: Positive = Field(2, description="ranks that split the matrices of one model; divides num_heads")
    replicas: Positive = Field(1, description="models side by side, each with a share of the micro-batches")


class Config(TrainingFile):
    """The sections every recipe shares, and how the model is split."""

    tensor_parallel_config: TensorParallelConfig = TensorParallelConfig()


RECIPE = Recipe(
    summary="Ranks split the matrices of a model, and add up what each computes with its part.",
    config=Config,
    layouts=[
        Layout("single", trainer=1),
        Layout("tensor_parallel", worker=per(RANKS.key, times=REPLICAS.key)),  # model by model
    ],
    flows=[
        in_rows("worker", row=RANKS),
        in_columns("worker", row=RANKS, when=lambda config: REPLICAS(config) > 1),  # they average their gradients
    ],
    checks=[split_models_fit(RANKS, REPLICAS)],
    traffic=traffic,
    unread=["multihost_config.pipeline_parallel_config", "multihost_config.num_workers"],
    naive=Naive([Layout("naive", worker=per(RANKS.key))], only={REPLICAS.key: 1, "training_config.model_type": "gpt"}),
    elastic="each rank holds parts of matrices that nobody else has",
)
