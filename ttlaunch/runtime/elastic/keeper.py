"""State that members do not have in common: slots of a state that is cut, and what local steps have made of the weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ttlaunch.membership.messages import Begin
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
