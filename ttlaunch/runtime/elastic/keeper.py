"""State that members do not have in common: slots of a state that is cut, and what local steps have made of the weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ttlaunch.membership import worker
from ttlaunch.membership.messages import Begin
from ttlaunch.membership.slots import divide_slots
from ttlaunch.runtime.elastic.state_transfer import ReplicaState


class Keeper(Protocol):
    """The part of the state that this worker keeps."""

    @property
    def slots(self) -> int:
        """Into how many slots the state is cut, as `divide_slots` takes it."""

    def begin_with(self, applied: int | None) -> None:
        """Note the step of the state with which this worker registers; None: it has none."""

    def enter(self, begin: Begin) -> Mapping[int, int]:
        """Give others what they lack at the begin of an epoch, and get what this worker lacks; return bytes by number of the giver.

        Raises:
            EpochOverError, CommunicationError: As for `Puller.pull`.
        """


@dataclass(frozen=True)
class LocalSteps:
    """Steps that a worker takes without others, see `ttlaunch/membership/local_epochs.py`, and averages.

    Attributes:
        shared: What all workers have equal since an average; a worker that lacks the last one gets it.
        last_average: Returns the last step that has an average, up to a step; 0 if there is none.
        own_steps: Returns how many steps only this worker's weights have; any thread may call it.
    """

    shared: ReplicaState
    last_average: Callable[[int], int]
    own_steps: Callable[[], int]


def with_slots(state: worker.WorkerState, begin: Begin, *, slots: int) -> worker.WorkerState:
    """Note that this worker has all that its place in an epoch needs, also if that epoch is over by now."""
    place = begin.numbers.index(state.member.number)
    share = divide_slots([seat.host for seat in begin.seats], slots=slots).of(place)
    acting = replace(state, begin=begin)
    if state.applied != begin.applied:
        acting = worker.catch_up(acting)
    return replace(worker.take_share(acting, share), begin=state.begin)


def after_update(state: worker.WorkerState, step: int) -> worker.WorkerState:
    """Note that a step is in what this worker keeps, also while the members change."""
    if state.applied == step:
        return replace(state, held=())  # an epoch that has begun with this step may have given this worker other slots
    return replace(state, applied=step, held=(), shares=state.shares[:1], is_ready=False)
