"""The order in which a pipeline stage runs its forward and backward passes: pure functions, equal on every rank.

A rank has one chunk of the model, or with the interleaved schedule several that are far apart in it: chunk c of the
rank at stage s is part `c * p + s` of the model. A pass of a chunk needs what the part before (forward) or after
(backward) it sends; p = stages, m = micro-batches, v = chunks of a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ttlaunch.runtime.comm.reduction import contiguous_blocks

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one chunk.

    `F3` is the forward pass of micro-batch 3, `B3` its backward pass; `F3.1` the one through chunk 1.
    """

    kind: Literal["F", "B"]
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


def gpipe(stage: int, *, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Order the passes of one pipeline stage under the GPipe schedule: all forward passes, then all backward passes.

    The stages stand idle for `p - 1` of `m + p - 1` slots, as with 1F1B, but each holds all m micro-batches at once. It
    has the fewest changes of direction, so it is quicker where messages are slow.

    Returns:
        `2 * m` actions, for every stage the same.

    Raises:
        ValueError: There is no such stage, or no micro-batch.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
        2019; the backward passes go in the order of the forward passes here, because gradients are added in it.

    >>> [str(action) for action in gpipe(0, num_stages=2, num_micro_batches=3)]
    ['F0', 'F1', 'F2', 'B0', 'B1', 'B2']
    """
    _check(stage, num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=1)
    forwards, backwards = _passes([range(num_micro_batches)], num_chunks=1)
    return [*forwards, *backwards]


def one_f_one_b(stage: int, *, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Order the passes of one pipeline stage under the 1F1B schedule.

    Warm-up runs one forward per stage after this one; steady state alternates forward and backward; cool-down drains.
    At most `p - stage` micro-batches are in flight, where GPipe holds all of them; the bubble is the same.

    Returns:
        `2 * m` actions, equal on every rank for equal arguments, so neighbours never need to talk.

    Raises:
        ValueError: There is no such stage, or no micro-batch.

    Source: D. Narayanan et al., "PipeDream", SOSP 2019, with the flush of their ICML 2021 paper.

    >>> [str(action) for action in one_f_one_b(0, num_stages=2, num_micro_batches=3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    _check(stage, num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=1)
    forwards, backwards = _passes([range(num_micro_batches)], num_chunks=1)
    return _one_by_one(forwards, backwards, warm_up=num_stages - stage - 1)


def interleaved(stage: int, *, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Action]:
    """Order the passes of one pipeline stage under the interleaved 1F1B schedule.

    Micro-batches go in groups of p through the first chunks of all ranks, then through the second ones, and so on. A
    rank then begins its backward passes after `1 / v` of the time, so the bubble is v times shorter. The price is v times as many
    messages, and more activations in flight: those of `2 * (p - stage - 1) + (v - 1) * p + 1` passes through a chunk.

    Returns:
        `2 * m * v` actions. In each chunk, micro-batches follow in their order.

    Raises:
        ValueError: There is no such stage, or no micro-batch, or no chunk.

    Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC
        2021, section 2.2. Where p does not divide m, groups are a little larger than p here, instead of being refused;
        with fewer than p micro-batches they are one group.

    >>> [str(action) for action in interleaved(1, num_stages=2, num_micro_batches=2, num_chunks=2)]
    ['F0', 'F1', 'F0.1', 'B0.1', 'F1.1', 'B1.1', 'B0', 'B1']
    """
    _check(stage, num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=num_chunks)
    groups = _groups(num_stages, num_micro_batches)
    forwards, backwards = _passes(groups, num_chunks=num_chunks)
    return _one_by_one(forwards, backwards, warm_up=2 * (num_stages - stage - 1) + (num_chunks - 1) * len(groups[0]))


def order_of_passes(
    name: ScheduleName, stage: int, *, num_stages: int, num_micro_batches: int, num_chunks: int = 1
) -> list[Action]:
    """Return the passes of a stage under the schedule of this name: `gpipe`, `one_f_one_b` or `interleaved`.

    Raises:
        ValueError: The schedule's function refuses its arguments, or the schedule has one chunk and more are given.
    """
    if name == "interleaved":
        return interleaved(stage, num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=num_chunks)
    if num_chunks != 1:
        raise ValueError(f"schedule {name} has one chunk a rank, not {num_chunks}")
    schedule = gpipe if name == "gpipe" else one_f_one_b
    return schedule(stage, num_stages=num_stages, num_micro_batches=num_micro_batches)


def _check(stage: int, *, num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
    if not 0 <= stage < num_stages or num_micro_batches < 1 or num_chunks < 1:
        chunks = "" if num_chunks == 1 else f" and {num_chunks} chunks"
        raise ValueError(
            f"no schedule for stage {stage} of {num_stages} with {num_micro_batches} micro-batches{chunks}"
        )


def _groups(num_stages: int, num_micro_batches: int) -> list[range]:
    """Divide micro-batches into groups that go through a chunk together: at least p each, if there are p; the largest first."""
    return contiguous_blocks(num_micro_batches, max(1, num_micro_batches // num_stages))


def _passes(groups: Sequence[range], *, num_chunks: int) -> tuple[list[Action], list[Action]]:
    """Return all forward passes and all backward passes, each in order."""
    chunks = range(num_chunks)
    forwards = [Action("F", index, chunk) for group in groups for chunk in chunks for index in group]
    backwards = [Action("B", index, chunk) for group in groups for chunk in reversed(chunks) for index in group]
    return forwards, backwards


def _one_by_one(forwards: list[Action], backwards: list[Action], *, warm_up: int) -> list[Action]:
    """Order `warm_up` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    warm_up = min(warm_up, len(forwards))
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return [*forwards[:warm_up], *steady, *backwards[len(backwards) - warm_up :]]
