"""In which order a pipeline stage runs its forward and backward passes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch: `F3` is the forward pass of micro-batch 3, `B3` its backward pass."""

    kind: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def one_f_one_b(stage: int, *, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Order the passes of one pipeline stage under the 1F1B schedule.

    Warm-up runs one forward per stage after this one; steady state alternates forward and backward; cool-down drains.
    At most `num_stages - stage` micro-batches are in flight, where GPipe holds all of them; the bubble is the same.

    Returns:
        `2 * num_micro_batches` actions, equal on every rank for equal arguments, so neighbours never need to talk.

    Raises:
        ValueError: There is no such stage, or no micro-batch.

    Source: D. Narayanan et al., "PipeDream", SOSP 2019, with the flush of their ICML 2021 paper.

    >>> [str(action) for action in one_f_one_b(0, num_stages=2, num_micro_batches=3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    if not 0 <= stage < num_stages or num_micro_batches < 1:
        raise ValueError(f"no schedule for stage {stage} of {num_stages} with {num_micro_batches} micro-batches")
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    forwards = [Action("F", index) for index in range(num_micro_batches)]
    backwards = [Action("B", index) for index in range(num_micro_batches)]
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return [*forwards[:warm_up], *steady, *backwards[num_micro_batches - warm_up :]]
