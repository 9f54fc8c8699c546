"""What the updates of a run were made of, where gradients may be old: enough to make them again, in one process, with the same bits."""

from collections.abc import Mapping
from typing import NamedTuple

Part = tuple[int, int, int]
"""Micro-batches in a row: the first, one past the last, and the number of updates in the weights of their gradient."""


class RecordedUpdate(NamedTuple):
    """What one update was made of.

    Attributes:
        task: The step whose data its gradients were computed from.
        parts: Rows of all micro-batches of the task, in order; those of one row were differentiated with the same weights.
    """

    task: int
    parts: tuple[Part, ...]

    @property
    def version(self) -> float:
        """The mean number of updates in the weights of all micro-batches."""
        return sum((stop - first) * version for first, stop, version in self.parts) / self.parts[-1][1]


class UnusableUpdatesError(ValueError):
    """The recorded updates cannot be made again; the text says why, as a clause."""


def in_order(updates: Mapping[int, RecordedUpdate], *, done: int, micro_batches: int) -> tuple[RecordedUpdate, ...]:
    """Return a run's updates in their order.

    Args:
        updates: What was recorded, by the number of the update, from files that anything may have happened to.
        done: The updates that the run began with.
        micro_batches: M.

    Raises:
        UnusableUpdatesError: An update is missing, applies a task for a second time, or names micro-batches or weights that
            there cannot have been.
    """
    found: list[RecordedUpdate] = []
    applied: dict[int, int] = {}
    for step in range(done + 1, max(updates, default=done) + 1):
        update = updates.get(step)
        if update is None:
            raise UnusableUpdatesError(f"there is no record of what update {step} was made of")
        before = applied.setdefault(update.task, step)
        if before != step:
            raise UnusableUpdatesError(f"updates {before} and {step} are recorded with the same task, {update.task}")
        ends = [0, *(stop for _, stop, _ in update.parts)]
        if ends[-1] != micro_batches or any(
            not begun == first < stop for begun, (first, stop, _) in zip(ends, update.parts, strict=False)
        ):
            raise UnusableUpdatesError(f"the record of update {step} has other micro-batches than a step")
        if any(not done <= version < step for _, _, version in update.parts):
            raise UnusableUpdatesError(f"the record of update {step} names weights that there were not yet, or no more")
        found.append(update)
    return tuple(found)
