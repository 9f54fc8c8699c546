"""What the two threads of a worker of an elastic run share: the orders that it has got, and what it may do.

    orders --> thread --> Standing <-- the role's thread

The thread that takes orders stops the transfers of an epoch that is over and changes nothing else; the role's thread waits here for
the next epoch.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.membership import worker
from ttlaunch.membership.messages import Begin, Dismiss, Finish, Follow, Member, Message, Prepare
from ttlaunch.runtime.comm.grpc.directory import Directory
from ttlaunch.runtime.comm.protocol import CommunicationError, EpochOverError
from ttlaunch.runtime.elastic.ends import AbandonedError, FinishedError, HasLast, LeftError
from ttlaunch.runtime.world import Rank

if TYPE_CHECKING:  # ranks of every recipe import this file, also where gRPC is not installed
    from ttlaunch.runtime.comm.grpc.communicator import GrpcCommunicator

_LOOK_S = 0.5
_PATIENCE_S = 60.0  # the coordinator notices a worker that is gone sooner than this
_UNNOTICED_S = 5.0  # and a process that has ended long before; so a connection broke between two that live


class Standing:
    """Where a worker stands in its run.

    Attributes:
        order: The newest order to follow others; None if there was none.
        directory: The members of the newest epoch in which this worker has acted; None before the first.
    """

    def __init__(
        self, own: Member, *, transport: "GrpcCommunicator", close_calls: Callable[[], object], stop_order: HasLast
    ) -> None:
        """Have got no order yet.

        Args:
            own: The worker.
            transport: Its transport, which an order stops.
            close_calls: Ends the calls in which it gets what others give.
            stop_order: Says when the whole run ends early.
        """
        self._own, self._transport, self._close_calls, self._stop_order = own, transport, close_calls, stop_order
        self._changed = threading.Condition()
        self._state = worker.WorkerState(own)
        self._next: Begin | None = None
        self._has_answered = self._is_abandoned = False
        self._end: Dismiss | Finish | None = None
        self.order: Follow | None = None
        self.directory: Directory | None = None

    @property
    def state(self) -> worker.WorkerState:
        """What this worker has; a state never changes, orders and updates put another one in its place."""
        return self._state

    # In the thread that takes orders

    def take(self, message: Message) -> None:
        """Obey an order; one that comes late or again changes nothing."""
        with self._changed:
            match message:
                case Prepare() if message.epoch > self._state.epoch:
                    self._state = worker.prepare(self._state, message)
                    self._next, self._has_answered = None, False
                    self._stop_transfers()
                case Begin() if message.epoch == self._state.epoch and self._has_answered and not self._state.begin:
                    if self._own.number in message.numbers:
                        self._next = message
                case Follow() if self.order is None or message.epoch > self.order.epoch:
                    self.order = message
                case Dismiss() | Finish():
                    self._end = self._end or message
                    if isinstance(message, Dismiss):
                        self._stop_transfers()
            self._changed.notify_all()

    def abandon(self) -> None:
        """Stop all transfers, since there is no coordinator any more; the role then ends with `AbandonedError`."""
        with self._changed:
            self._is_abandoned = True
            self._stop_transfers()
            self._changed.notify_all()

    def _stop_transfers(self) -> None:
        self._transport.leave_epoch()
        self._close_calls()

    # In the role's thread

    def acting(self) -> worker.WorkerState:
        """Return the state of this worker, which acts in it: orders may change the next state at any time.

        Raises:
            EpochOverError: The members change.
            LeftError: This worker takes part no longer.
        """
        with self._changed:
            self._check_stays()
            state = self._state
        if state.begin is None:
            raise EpochOverError(f"epoch {state.epoch} has not begun: the members of the run change")
        return state

    def update(self, change: Callable[[worker.WorkerState], worker.WorkerState]) -> None:
        """Put another state in the place of the present one."""
        with self._changed:
            self._state = change(self._state)

    def check_follows(self) -> None:
        """Check that this worker may go on to get what others do without taking part.

        Raises:
            EpochOverError: An epoch needs it.
            LeftError: This worker takes part no longer.
        """
        with self._changed:
            self._check_stays()
            if self._state.epoch and self._state.begin is None:
                raise EpochOverError(f"epoch {self._state.epoch} needs this worker")

    def await_change(
        self, waiting: AbstractContextManager[None], *, report: Callable[[worker.WorkerState], object]
    ) -> None:
        """Wait until the coordinator has ended the epoch; then no transfer reads or writes tensors any more.

        Args:
            waiting: Is entered while this waits.
            report: Asks for another epoch, since this worker lost a member that nobody else misses.

        Raises:
            LeftError: This worker takes part no longer.
            CommunicationError: A member was lost, and the coordinator does not react.
        """
        with self._changed, waiting:
            is_first, has_asked = self.directory is None, False
            began = time.monotonic()
            while self._state.begin is not None or not self._state.epoch:
                self._check_stays()
                waited_s = time.monotonic() - began
                if not is_first and waited_s > _UNNOTICED_S and not has_asked:
                    has_asked = True
                    report(self._state)
                if not is_first and waited_s > _PATIENCE_S:
                    raise CommunicationError(
                        f"{contract.worker_name(self._own.number)} lost a member, and its orders do not come"
                    )
                self._changed.wait(_LOOK_S)

    def await_begin(
        self,
        waiting: AbstractContextManager[None],
        *,
        report: Callable[[worker.WorkerState], object],
        place: Callable[[Begin], Directory],
    ) -> Begin:
        """Answer what this worker has, wait for the next epoch, and begin it.

        Args:
            waiting: Is entered while this waits.
            report: Sends an answer of this state.
            place: Returns the directory of an epoch's members.

        Raises:
            LeftError: This worker takes part no longer.
        """
        with self._changed, waiting:
            while True:
                self._check_stays()
                if not self._has_answered:
                    self._has_answered = True
                    report(self._state)
                if self._next is not None:
                    begin, self._next = self._next, None
                    self._state = worker.begin(self._state, begin)
                    self.directory = place(begin)
                    # Under the lock: an order that ends this epoch has to come after its begin.
                    self._transport.begin_epoch(self.directory, rank=Rank(self._state.place))
                    return begin
                self._changed.wait(_LOOK_S)

    def await_end(self, waiting: AbstractContextManager[None]) -> bool:
        """Wait until the epoch is over; returns whether the run is, too.

        Raises:
            LeftError: This worker takes part no longer.
        """
        with self._changed, waiting:
            while self._state.begin is not None:
                if isinstance(self._end, Finish):
                    return True
                self._check_stays()
                self._changed.wait(_LOOK_S)
        return False

    def _check_stays(self) -> None:
        """Raise if this worker takes part no longer; called under the lock."""
        if self._is_abandoned:
            raise AbandonedError("it was told to save its state")
        if isinstance(self._end, Dismiss):
            raise LeftError(self._end.reason)
        state = self._state
        if isinstance(self._end, Finish) and (state.begin is None or not state.is_done):
            ended = FinishedError if state.is_done else LeftError
            raise ended("all steps of the run are made")
        if self.directory is None and state.applied is not None and self._stop_order.has_ended(state.applied):
            # One that has acted stays: others may lack what it has of the last step, and would make an average without it.
            raise LeftError("the run was ordered to stop")
