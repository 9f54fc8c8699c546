"""Local steps and averages among members that come and go: `ttlaunch/membership/local_epochs.py` carried out by a worker.

A worker looks before each local step whether the members change. If so, it stops there with its own weights, and goes on in the next
epoch. An average that was interrupted is made anew from the same weights, or comes from a member that has completed it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ttlaunch.membership.local_epochs import LocalEpoch, makers_of
from ttlaunch.membership.messages import Begin
from ttlaunch.runtime.comm.reduction import contiguous_blocks
from ttlaunch.runtime.elastic.keeper import LocalSteps
from ttlaunch.runtime.elastic.member import INTERRUPTIONS, ElasticMember
from ttlaunch.runtime.elastic.state_transfer import ReplicaState

T = TypeVar("T")


class LocalMembers:
    """Which micro-batches this worker has in a local step, and with whom it averages."""

    def __init__(self, member: ElasticMember, *, every: int, total_steps: int, micro_batches: int) -> None:
        """Take part in nothing yet.

        Args:
            member: This worker.
            every: The number of steps from one average to the next.
            total_steps: The last step, which has an average too.
            micro_batches: Those of a step, of all workers.
        """
        self._member, self._micro_batches = member, micro_batches
        self._every, self._total_steps = every, total_steps
        self._epochs: tuple[LocalEpoch, ...] = ()
        member.follow(self._follow)

    def share(self, shared: ReplicaState, *, own_steps: Callable[[], int]) -> None:
        """Say what all workers have equal since an average, and how to learn how many steps this worker has made since; call it first."""
        self._member.take_local_steps(LocalSteps(shared, self.last_average, own_steps))

    def block(self, step: int) -> range:
        """Return this worker's micro-batches of a step; empty in the step after it has come.

        Call it when no change of the members is under way, see `await_turn`.
        """
        makers = makers_of(self._epochs, step)
        if self._member.own.number not in makers:
            return range(0)
        return contiguous_blocks(self._micro_batches, len(makers))[makers.index(self._member.own.number)]

    def await_turn(self, step: int) -> None:
        """Return when this worker may make a local step: at once, unless the members change.

        Raises:
            LeftError: This worker takes part no longer.
        """
        self.together(step, _nothing)

    def together(self, step: int, act: Callable[[], T]) -> T | None:
        """Do something in a step, with the members of the epoch if it needs them, anew whenever they change.

        Args:
            step: The step; all steps before it are done.
            act: May send and receive. It must leave what it started from until it has succeeded.

        Returns:
            What `act` returns; None if others have ended the step, and gave what they have since then.

        Raises:
            LeftError: This worker takes part no longer.
        """
        while True:
            try:
                self._member.begin  # noqa: B018 - it raises
                if self._member.owes_validation:
                    self._member.validate(step - 1)
                return act()
            except INTERRUPTIONS:
                self._member.regroup()
                if self._member.applied >= step:
                    return None

    def each(self, indices: Iterable[int]) -> Iterator[int]:
        """Go through the micro-batches of a local step; a change of the members waits until its end."""
        return self._member.each(indices, to_the_end=True)

    def last_average(self, step: int) -> int:
        """Return the last step up to this one that ends with an average; 0 if there is none."""
        return step if step == self._total_steps else step - step % self._every

    def _follow(self, begin: Begin, _place: int) -> None:
        self._epochs = (*begin.earlier, (begin.applied, begin.numbers))


def _nothing() -> None:
    """Need no other worker."""
