"""Who took part in an elastic run whose workers take steps of their own: enough to repeat it, in one process, with the same bits."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

_MOST_NUMBER, _MOST_STEP, _MOST_EPOCHS = 10**6, 2**53, 100_000


class RecordedEpoch(NamedTuple):
    """The workers that took part from a step on.

    Attributes:
        step: The step after which the epoch began.
        members: The numbers of its members, sorted.
        came: Those that began it with the weights of the last average and an optimizer that knows no step.
    """

    step: int
    members: tuple[int, ...]
    came: tuple[int, ...] = ()


class UnusableEpochsError(ValueError):
    """The journal of an elastic run cannot be followed; the text says why, as a clause."""


def epochs_of(journal: Iterable[Mapping[str, Any]], *, done: int, total: int) -> tuple[RecordedEpoch, ...]:
    """Return the epochs that count for the bits of a run, in order.

    An epoch in which nobody who lives has made a step does not count: the next one began after the same step. Workers that came
    with it have come with the next one.

    Args:
        journal: The entries of the journal, from a file that anything may have happened to.
        done: The step that the run began with.
        total: The last step that the run could make.

    Raises:
        UnusableEpochsError: There is no epoch, an entry is damaged, or epochs do not follow each other.
    """
    found: list[RecordedEpoch] = []
    for entry in journal:
        if entry.get("what") != "epoch":
            continue
        if len(found) >= _MOST_EPOCHS:
            raise UnusableEpochsError(f"its journal has more than {_MOST_EPOCHS} epochs")
        epoch = _epoch(entry)
        if not found:
            found.append(epoch)
            continue
        if epoch.step < found[-1].step:
            raise UnusableEpochsError(f"its journal has an epoch after step {epoch.step} behind one after a later step")
        came = set(epoch.came)
        while len(found) > 1 and found[-1].step == epoch.step:
            came.update(found.pop().came)
        found.append(epoch._replace(came=tuple(sorted(came.intersection(epoch.members)))))
    if not found:
        raise UnusableEpochsError("its journal does not say who took part")
    if found[0].step != done or found[-1].step > total:
        raise UnusableEpochsError(
            f"its journal goes from step {found[0].step} to {found[-1].step}, the run from {done} to {total}"
        )
    return _without_strangers(found)


def _epoch(entry: Mapping[str, Any]) -> RecordedEpoch:
    step, members, came = entry.get("step"), _numbers(entry.get("members")), _numbers(entry.get("joined"))
    if not (_is_whole(step, most=_MOST_STEP) and members and came is not None and {*came} <= {*members}):
        raise UnusableEpochsError("an epoch in its journal is damaged")
    assert isinstance(step, int)  # noqa: S101 - `_is_whole` has looked
    return RecordedEpoch(step, members, came)


def _numbers(value: object) -> tuple[int, ...] | None:
    """Return different numbers of workers, sorted; None if they are none."""
    if not isinstance(value, list) or not all(_is_whole(one, most=_MOST_NUMBER) for one in value):
        return None
    return tuple(sorted(value)) if len({*value}) == len(value) else None


def _is_whole(value: object, *, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _without_strangers(epochs: list[RecordedEpoch]) -> tuple[RecordedEpoch, ...]:
    """Return the epochs; each member took part in the one before, or came.

    Raises:
        UnusableEpochsError: A member comes from nowhere.
    """
    for before, epoch in pairwise(epochs):
        strangers = {*epoch.members} - {*epoch.came} - {*before.members}
        if strangers:
            raise UnusableEpochsError(
                f"its journal does not say how worker {min(strangers)} came to the epoch after step {epoch.step}"
            )
    return tuple(epochs)
