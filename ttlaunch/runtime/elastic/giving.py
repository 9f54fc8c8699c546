"""What members give to others at the begin of an epoch: a mean gradient to workers that lack one step, the whole state to those that have none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ttlaunch import contract
from ttlaunch.membership.messages import Begin
from ttlaunch.runtime.comm.grpc.vectors import Key
from ttlaunch.runtime.elastic.feed import Feed, Mean, Sources, mean_of, numbers_of
from ttlaunch.runtime.elastic.state_transfer import LaterState, Puller, ReplicaState, SharedParts
from ttlaunch.runtime.world import Rank

_STATE, _MEAN, _COUNTS = "state", "mean", "counts"


class Giver:
    """What this worker gives away.

    Attributes:
        parts: What others pull that take part.
        feed: What others pull that do not take part yet.
        source: Both.
        mean: The last mean gradient; None when its memory holds values of another step.
    """

    def __init__(self) -> None:
        self.parts, self.feed = SharedParts(), Feed()
        self.source = Sources(self.feed, self.parts)
        self.mean: Mean | None = None

    def give(self, begin: Begin, own: int, replica: ReplicaState) -> None:
        """Copy what the members that are behind get from this worker, if it is one of those that have it.

        Cost: a copy of S/n bytes if a worker lacks the state, one of N values if one lacks the last mean.
        """
        self.parts.forget()
        if own not in begin.holders or not begin.behind:
            return
        part = replica.parts(len(begin.holders))[begin.holders.index(own)]
        self.parts.hold(Key(_STATE, begin.applied, part.start, part.stop, epoch=begin.epoch), replica.copy(part))
        if all(applied is None for _, applied in begin.behind):
            return
        # A worker that has just got its state from others has no mean, and says so.
        mean = self.mean if self.mean is not None and self.mean.step == begin.applied else None
        counts = numbers_of(replica, mean).view(torch.uint8)
        self.parts.hold(Key(_COUNTS, begin.applied, 0, len(counts), epoch=begin.epoch), counts)
        if mean is not None:
            values_N = mean.mean_N.detach().cpu().clone()
            self.parts.hold(Key(_MEAN, begin.applied, 0, len(values_N), epoch=begin.epoch), values_N)


def pull_state(puller: Puller, begin: Begin, replica: ReplicaState | LaterState) -> Mapping[int, int]:
    """Get the state from all that have it, an equal part from each; return how many bytes each has given, by number.

    Raises:
        EpochOverError, CommunicationError: As for `Puller.pull`.
    """
    sources = [Rank(begin.numbers.index(number)) for number in begin.holders]
    key = Key(_STATE, begin.applied, 0, 0, epoch=begin.epoch)
    return dict(zip(begin.holders, puller.pull_parts(key, replica, sources=sources), strict=True))


@dataclass(frozen=True)
class PulledMean:
    """A mean gradient that others have given.

    Attributes:
        numbers: What belongs to the state after its step besides tensors.
        bytes_of: How many bytes each has given, by number.
    """

    mean: Mean
    numbers: Sequence[float]
    bytes_of: Mapping[int, int]


def pull_mean(puller: Puller, begin: Begin, replica: ReplicaState, *, into_N: Tensor) -> PulledMean | None:
    """Get the mean gradient of the step that others have applied, an equal part from each that has it; None if nobody has it.

    Raises:
        EpochOverError: The members change meanwhile.
        CommunicationError: A member says what cannot be, or as for `Puller.pull`.
    """
    step, found = begin.applied, []
    for number in begin.holders:
        known = numbers_of(replica, None)
        counts = known.view(torch.uint8)
        key = Key(_COUNTS, step, 0, len(counts), epoch=begin.epoch)
        puller.pull(key, counts, source=Rank(begin.numbers.index(number)))
        if known[0]:
            found.append((number, known))
    if not found:
        return None
    givers, known = [number for number, _ in found], found[0][1]
    mean, numbers = mean_of(step, known, into_N, giver=contract.worker_name(givers[0]))
    sources = [Rank(begin.numbers.index(number)) for number in givers]
    parts = puller.pull_vector(Key(_MEAN, step, 0, 0, epoch=begin.epoch), into_N, sources=sources)
    return PulledMean(mean, numbers, dict(zip(givers, parts, strict=True)))


def describe_given(given: Mapping[int, int], *, own: int, step: int) -> str:
    """Return a line for the user that says what a worker has got from others, by number, of the state of a step."""
    givers, size = ", ".join(map(contract.worker_name, given)), sum(given.values())
    return f"{contract.worker_name(own)} takes part from step {step + 1} on, with {size} bytes of state from {givers}"
