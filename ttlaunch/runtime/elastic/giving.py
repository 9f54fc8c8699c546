"""What members give to others at the begin of an epoch: a mean gradient to workers that lack one step, the whole state to those that have none."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ttlaunch import contract
from ttlaunch.membership.messages import Begin
from ttlaunch.runtime.comm.grpc.pieces import Key
from ttlaunch.runtime.comm.protocol import CommunicationError
from ttlaunch.runtime.elastic.state_transfer import LaterState, Puller, ReplicaState, SharedParts
from ttlaunch.runtime.world import Rank

_MOST_TOKENS = 2**53
"""A float holds every smaller number of tokens exactly."""

_STATE, _MEAN, _COUNTS = "state", "mean", "counts"


@dataclass(frozen=True)
class Mean:
    """The mean gradient of a step, with what the step's report needs.

    Attributes:
        mean_N: Shape `(N,)`, float32; the exchange overwrites it when all members make the next step.
    """

    step: int
    loss: float
    tokens: int
    mean_N: Tensor


class Giver:
    """What this worker gives away.

    Attributes:
        parts: What others pull.
        mean: The last mean gradient; None when its memory holds values of another step.
    """

    def __init__(self) -> None:
        self.parts = SharedParts()
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
        if begin.applied - 1 not in {applied for _, applied in begin.behind}:
            return
        # A worker that has just got its state from others has no mean, and says so.
        mean = self.mean if self.mean is not None and self.mean.step == begin.applied else None
        known = [0.0, 0.0, 0.0] if mean is None else [1.0, mean.loss, float(mean.tokens)]
        counts = torch.tensor(known, dtype=torch.float64).view(torch.uint8)
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


def pull_mean(puller: Puller, begin: Begin, *, step: int, into_N: Tensor) -> tuple[int, Mean] | None:
    """Get the mean gradient of the step that others have applied, from the first that has it; return its number, too; None if nobody has it.

    Raises:
        EpochOverError: The members change meanwhile.
        CommunicationError: A member says what cannot be, or as for `Puller.pull`.
    """
    for number in begin.holders:
        source = Rank(begin.numbers.index(number))
        known = torch.zeros(3, dtype=torch.float64)
        counts = known.view(torch.uint8)
        puller.pull(Key(_COUNTS, step, 0, len(counts), epoch=begin.epoch), counts, source=source)
        has_mean, loss, tokens = known.tolist()
        if has_mean and not 0 <= tokens < _MOST_TOKENS:
            raise CommunicationError(f"{contract.worker_name(number)} says that step {step} had {tokens:g} tokens")
        if has_mean:
            puller.pull(Key(_MEAN, step, 0, len(into_N), epoch=begin.epoch), into_N, source=source)
            return number, Mean(step, loss, int(tokens), into_N)
    return None


def describe_given(given: Mapping[int, int], *, own: int, step: int) -> str:
    """Return a line for the user that says what a worker has got from others, by number, of the state of a step."""
    givers, size = ", ".join(map(contract.worker_name, given)), sum(given.values())
    return f"{contract.worker_name(own)} takes part from step {step + 1} on, with {size} bytes of state from {givers}"
