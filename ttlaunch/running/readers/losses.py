"""Read the losses of a run, in training and in validations, as points over its steps and its time."""

from collections.abc import Iterator
from dataclasses import dataclass

from ttlaunch.records.ranks import StepDone, Validation
from ttlaunch.running.bad_records import progress_of
from ttlaunch.running.readers.recorded import Recorded
from ttlaunch.running.watch import RankState, start_up_end

_MOST_POINTS = 512
_LARGEST = 1e100
"""Losses that are larger, infinite or NaN are left out of curves, because no axis could show them beside the others."""


@dataclass(frozen=True)
class LossPoint:
    """A loss at a step; `seconds` counts from the end of the start-up."""

    step: float
    loss: float
    seconds: float


@dataclass(frozen=True)
class Losses:
    """The losses of a run.

    Attributes:
        training: By step, the mean of the losses that ranks report; of a long run, the means of some steps each.
        validation: The losses of the validations.
        left_out: How many losses are no numbers that can be drawn, such as NaN.
    """

    training: tuple[LossPoint, ...]
    validation: tuple[LossPoint, ...]
    left_out: int


class _Means:
    """Means over steps; so that a million steps need little memory, neighbours are joined when there are too many."""

    def __init__(self) -> None:
        self._every = 1
        self._sums: dict[int, tuple[int, float, LossPoint]] = {}

    def add(self, point: LossPoint) -> None:
        self._join(int(point.step) // self._every, (1, point.loss, point))
        if len(self._sums) > 2 * _MOST_POINTS:
            self._every *= 2
            known, self._sums = self._sums, {}
            for key, entry in known.items():
                self._join(key // 2, entry)

    def _join(self, key: int, entry: tuple[int, float, LossPoint]) -> None:
        """Add a number of losses, their sum and the last of them to an entry."""
        count, total, last = entry
        before, sum_before, known = self._sums.get(key, (0, 0.0, last))
        self._sums[key] = before + count, sum_before + total, max(known, last, key=lambda point: point.seconds)

    def points(self) -> tuple[LossPoint, ...]:
        """Return a point for each step or group of steps, at the last report of it."""
        found = (LossPoint(last.step, total / count, last.seconds) for count, total, last in self._sums.values())
        return tuple(sorted(found, key=lambda point: point.step))


def read_losses(recorded: Recorded) -> Losses:
    """Read the losses of a run from its folder.

    Raises:
        OSError: The folder cannot be read.
    """
    first = min((state.first_step_time for state in recorded.ranks if state.first_step_time is not None), default=0.0)
    began = start_up_end(recorded.ranks, reports_ready=True) or first
    training, validation, left_out = _Means(), [], 0
    for state in recorded.ranks:
        for record in _with_loss(recorded, state):
            time = record.time - state.clock_offset_s
            loss = record.loss
            if loss is None or not abs(loss) < _LARGEST:  # also for NaN
                left_out += 1
                continue
            point = LossPoint(record.step, loss, max(0.0, time - began))
            if isinstance(record, StepDone):
                training.add(point)
            else:
                validation.append(point)
    return Losses(training.points(), tuple(sorted(validation, key=lambda point: point.step)), left_out)


def _with_loss(recorded: Recorded, state: RankState) -> Iterator[StepDone | Validation]:
    for record in progress_of(recorded.path, state.row.rank):
        if isinstance(record, (StepDone, Validation)) and record.loss is not None:
            yield record
