"""Rules and traffic of recipes whose workers take several steps between two exchanges."""

from collections.abc import Iterator
from typing import Any

from ttlaunch.spec.recipe.collective_traffic import averaging_traffic, validation_traffic
from ttlaunch.spec.recipe.compression import compressed_averaging_traffic
from ttlaunch.spec.recipe.declare import Layout, Problem
from ttlaunch.spec.recipe.sections import TrainingFile
from ttlaunch.spec.recipe.traffic import Ranks, Traffic


def local_steps_have_no_loss_scale(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Workers that take steps of their own use no loss scale: each would choose another one and skip other steps."""
    if config.training_config.precision == "fp16":
        yield Problem(
            "C076",
            "`precision` is fp16, with which every worker would choose a loss scale of its own",
            "training_config.precision",
            "expected fp32 or bf16 where workers take steps of their own",
            hints=("`--set training_config.precision=bf16`",),
        )


def messages_of_several_steps_overtake(config: Any, _layout: Layout) -> Iterator[Problem]:
    """Where messages of a step may pass those of the step before, sockets have tags."""
    bound = config.classic_dp_config.staleness_bound
    if bound and config.multihost_config.socket_type == "fabric":
        yield Problem(
            "C075",
            f"`staleness_bound` is {bound}, which needs `socket_type: mpi`",
            "multihost_config.socket_type",
            "here the messages of a step cannot overtake those of another",
            others=(("classic_dp_config.staleness_bound", "lets several steps be under way"),),
            hints=("`--set multihost_config.socket_type=mpi`", "`--set classic_dp_config.staleness_bound=0`"),
        )


def local_steps_traffic(config: Any, ranks: Ranks, *, every: int) -> list[Traffic]:
    """Return the traffic of an average every so many steps, and of validations."""
    workers = ranks.of("worker")
    found = validation_traffic(workers, ranks.validation_micro_batches)
    if config.compression_config.kind != "none":
        return found + compressed_averaging_traffic(config, workers, ranks, every=every)
    size = ranks.weight_bytes(workers[0]) if workers else 0
    return found + averaging_traffic(config, workers, size, every=every)
