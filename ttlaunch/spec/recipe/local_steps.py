"""Rules and traffic of recipes whose workers take several steps between exchanges, or lead each other by several."""

from collections.abc import Iterator
from typing import Any

from ttlaunch.spec.recipe.collective_traffic import averaging_traffic, validation_traffic
from ttlaunch.spec.recipe.compression import compressed_averaging_traffic
from ttlaunch.spec.recipe.declare import Layout, Problem
from ttlaunch.spec.recipe.sections import TrainingFile
from ttlaunch.spec.recipe.traffic import Ranks, Traffic


def local_steps_have_no_loss_scale(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Refuse fp16 where workers update their own weights: each would choose a different loss scale and skip different steps."""
    if config.training_config.precision == "fp16":
        yield Problem(
            "C076",
            "`precision` is fp16, but every worker would choose its own loss scale",
            "training_config.precision",
            "expected fp32 or bf16, because workers update their own weights",
            hints=("`--set training_config.precision=bf16`",),
        )


def messages_of_several_steps_overtake(config: Any, _layout: Layout) -> Iterator[Problem]:
    """Refuse a staleness bound with `socket_type: fabric`, whose messages have no tags and cannot overtake each other."""
    bound = config.classic_dp_config.staleness_bound
    if bound and config.multihost_config.socket_type == "fabric":
        yield Problem(
            "C075",
            f"`staleness_bound` is {bound}, which needs `socket_type: mpi`",
            "multihost_config.socket_type",
            "expected mpi; over fabric, messages of one step cannot overtake those of another",
            others=(("classic_dp_config.staleness_bound", "lets several steps be under way"),),
            hints=("`--set multihost_config.socket_type=mpi`", "`--set classic_dp_config.staleness_bound=0`"),
        )


def local_steps_traffic(config: Any, ranks: Ranks, *, every: int) -> list[Traffic]:
    """Return the traffic of validations, and of averaging the weights every `every` steps."""
    workers = ranks.of("worker")
    found = validation_traffic(workers, ranks.validation_micro_batches)
    if config.compression_config.kind != "none":
        return found + compressed_averaging_traffic(config, workers, ranks, every=every)
    size = ranks.weight_bytes(workers[0]) if workers else 0
    return found + averaging_traffic(config, workers, size, every=every)
