"""Whose work a step is where workers take steps of their own and average their weights from time to time (local SGD).

A local step needs no message, so at a change of the members each worker ends the one that it makes, and an epoch begins after the
largest step s that any of them has reported. That step includes an average that was due after it. From this follows, for everybody:

    local steps up to s + 1    have the division of the epochs before: a worker may have made step s + 1 when it stops
    local steps from s + 2 on  are divided among the members of the new epoch
    averages up to s           were those of the epochs before: whoever lacks one gets it from a member that has it
    averages from s + 1 on     are made by the members of the new epoch

So the bits follow from the epochs, each with its members and its step. An epoch that begins after a step makes earlier ones
that began there or later void: nobody who lives has made a step of them.
"""

from collections.abc import Iterable, Sequence

LocalEpoch = tuple[int, tuple[int, ...]]
"""The step after which an epoch began, and the numbers of its members, sorted."""


def still_counting(epochs: Sequence[LocalEpoch], *, begun: int, made: Iterable[int | None]) -> tuple[LocalEpoch, ...]:
    """Return the epochs that still count when another one begins.

    Args:
        epochs: Those so far, in order; the first one has made all steps before the second.
        begun: The step after which the new one begins.
        made: The last step that each of its members has made; None where it has just come.
    """
    least = min(step for step in made if step is not None)
    kept = [*epochs[:1], *(epoch for epoch in epochs[1:] if epoch[0] < begun)]
    while len(kept) > 1 and _makes(kept[1], least + 1):
        del kept[0]  # nobody makes a step of it any more
    return tuple(kept)


def makers_of(epochs: Sequence[LocalEpoch], step: int) -> tuple[int, ...]:
    """Return the numbers of the workers that share a local step, in the order of their blocks of micro-batches."""
    _, numbers = [epochs[0], *(epoch for epoch in epochs[1:] if _makes(epoch, step))][-1]
    return numbers


def averagers_of(epochs: Sequence[LocalEpoch], step: int) -> tuple[int, ...]:
    """Return the numbers of the workers whose weights the average after a step is made of, sorted."""
    _, numbers = [epochs[0], *(epoch for epoch in epochs[1:] if epoch[0] < step)][-1]
    return numbers


def _makes(epoch: LocalEpoch, step: int) -> bool:
    return epoch[0] <= step - 2
