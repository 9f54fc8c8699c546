"""What recipes whose workers take steps of their own have in common: a rule for their configuration."""

from collections.abc import Iterator

from ttlaunch.recipe.declare import Layout, Problem
from ttlaunch.recipe.sections import TrainingFile


def local_steps_have_no_loss_scale(config: TrainingFile, _layout: Layout) -> Iterator[Problem]:
    """Where workers take steps of their own, each would choose another loss scale, and skip other steps."""
    if config.training_config.precision == "fp16":
        yield Problem(
            "C076",
            "`precision` is fp16, with which every worker would choose a loss scale of its own",
            "training_config.precision",
            "expected fp32 or bf16 where workers take steps of their own",
            hints=("`--set training_config.precision=bf16`",),
        )
