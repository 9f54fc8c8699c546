"""An asynchronous parameter server whose workers come and go: a task of a worker that is gone is handed out again.

    a change     every transfer fails, and the messages of the epoch before are lost
    worker       I have pushed task 7, compute task 9, and shall compute task 12 next
    server       push task 7 again              if its gradient has not arrived
                 tasks and weights              if an answer was lost, or the worker is new

Which worker has which tasks is in `membership/tasks.py`. Only the server applies gradients, and it applies none of a task that is closed.

Shapes: N = values of the flat vector, S = 4N = bytes of the weights in float32.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor

from ttlaunch.membership.messages import Begin
from ttlaunch.membership.tasks import TaskList, TasksInHand
from ttlaunch.runtime.comm.protocol import CommunicationError, Pending
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.elastic.member import INTERRUPTIONS, ElasticMember
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.servers import messages
from ttlaunch.runtime.parallel.servers.pushes import HEADER_BYTES, Push, read_push
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

_MOST_IN_HAND = 2


class ElasticTaskServer:
    """Serves weights and tasks to `ElasticTaskClient`s. It has the first place in every epoch, and exists once.

    The calls of a recipe's loop are those of `AsyncParameterServer`, which goes with `ElasticMember.stay`; workers have their numbers
    for life in place of ranks.

    Cost: that of `AsyncParameterServer`. A change of the members costs a message of 40 bytes from each worker and one of 8 bytes
        back, and once more whatever was under way.
    Order: the updates happen in the order in which gradients arrive; the run records it.

    Attributes:
        dropped: How many gradients came of tasks that were closed.
    """

    def __init__(self, ctx: RankContext, model: Model, tasks: TaskList) -> None:
        """Create the server; call it before `RankContext.restore`.

        Raises:
            ValueError: The run is not elastic.
        """
        if ctx.elastic is None:
            raise ValueError("this server needs a run that was started with `--elastic`")
        self._ctx, self._model, self._in_hand = ctx, model, TasksInHand(tasks)
        self._member: ElasticMember = ctx.elastic
        self.dropped = 0
        # By number, as all of these: who waits for a task, and whether it wants weights.
        self._parked: dict[int, bool] = {}
        self._receiving: dict[int, tuple[Pending, Tensor]] = {}
        self._sending: dict[int, list[tuple[Pending, Tensor]]] = {}
        self._buffers: dict[int, Tensor] = {}
        self._ranks: dict[int, Rank] = {}
        self._version = ctx.steps_done  # updates in the weights
        self._dismissed: set[int] = set()  # in this epoch
        self._met: set[int] = set()
        self._member.follow(self._begin_epoch)

    @property
    def handed_out_again(self) -> int:
        """How many tasks were taken from workers that are gone."""
        return self._in_hand.handed_out_again

    def next_push(self, meanwhile: Callable[[], bool] | None = None) -> tuple[int, Push]:
        """Take the gradient that arrives next, of a task that is open, and leave it in `model.grads_N`.

        Cost: one message in, of a header and S bytes (uint8).

        Args:
            meanwhile: As for `AsyncParameterServer.next_push`.

        Returns:
            The number of the worker, and what it sent besides the gradient.

        Raises:
            LeftError: This process takes part no longer.
            CommunicationError: A worker says what cannot be.
        """
        while True:
            try:
                found = self._serve_one(meanwhile=meanwhile)
            except INTERRUPTIONS:
                self._member.regroup()
                continue
            if found is not None:
                number, push, payload = found
                self._model.grads_N.copy_(payload.view(torch.float32))
                return number, push

    def answer(self, number: int, push: Push) -> None:
        """Close the task of a gradient that has been applied, and give the worker its next one, with weights if it asked for them.

        Cost: one message of 24 bytes (int64), and one of S bytes (float32) if the worker asked for weights.
        """
        self._version = self._ctx.step
        self._in_hand.close(number, push.task)
        with suppress(*INTERRUPTIONS):  # the worker then says what it has, and gets another answer
            self._give(number, with_weights=push.wants_weights)

    def dismiss(self) -> None:
        """After the last step, tell all workers that none is left, and drop gradients that still come; again when members have changed.

        Cost: 24 bytes (int64) to each worker, and S bytes in for each gradient that still comes.

        Raises:
            EpochOverError, PeerLostError: The members change.
        """
        self._in_hand.is_ending = True
        self._wake()
        while self._dismissed < self._ranks.keys():
            found = self._serve_one()
            if found is not None:
                number, push, _ = found
                self._in_hand.drop(number, push.task)
                self._give(number, with_weights=push.wants_weights)

    def _begin_epoch(self, begin: Begin, _place: int) -> None:
        """Forget what was under way, and take back the tasks of workers that are gone."""
        numbers = [number for number in begin.numbers if number != self._member.own.number]
        self._in_hand.begin_epoch(numbers)
        self._ranks = {number: Rank(begin.numbers.index(number)) for number in numbers}
        self._buffers = {number: self._buffers.get(number, self._room()) for number in numbers}
        self._parked, self._receiving, self._sending = {}, {}, {}
        self._dismissed, self._met = set(), set()

    def _room(self) -> Tensor:
        return torch.empty(HEADER_BYTES + self._model.grads_N.nbytes, dtype=torch.uint8, device=self._ctx.device)

    def _serve_one(self, *, meanwhile: Callable[[], bool] | None = None) -> tuple[int, Push, Tensor] | None:
        """Serve the message that comes next; return it if it brings the gradient of an open task."""
        self._member.begin  # noqa: B018 - it raises
        for number in self._ranks.keys() - self._receiving.keys() - self._met:
            self._expect(number, torch.empty(5, dtype=torch.int64), messages.REGISTER)
        waiting = list(self._receiving)
        number = waiting[self._wait([self._receiving[number][0] for number in waiting], meanwhile)]
        message, buffer = self._receiving.pop(number)
        message.wait()
        if buffer.dtype == torch.int64:
            self._meet(number, buffer.tolist())
            return None
        push, payload = read_push(buffer)
        self._check(number, push)
        if self._in_hand.is_awaited(number, push.task):
            return number, push, payload
        self.dropped += 1
        self._give(number, with_weights=push.wants_weights)
        return None

    def _wait(self, pending: list[Pending], meanwhile: Callable[[], bool] | None) -> int:
        with operation(self._ctx, "pushes"):
            place = self._ctx.wait_any(pending, timeout_s=0)
            while place is None and meanwhile is not None and meanwhile():
                place = self._ctx.wait_any(pending, timeout_s=0)
            place = self._ctx.wait_any(pending) if place is None else place
        assert place is not None  # noqa: S101 - nothing limits the time
        return place

    def _expect(self, number: int, buffer: Tensor, tag: int) -> None:
        with operation(self._ctx, "pushes"):
            self._receiving[number] = self._ctx.irecv(buffer, source=self._ranks[number], tag=tag), buffer

    def _meet(self, number: int, said: list[int]) -> None:
        """Bring a worker's tasks in line with what it says at the begin of an epoch."""
        self._met.add(number)
        wanted, wants_weights, pushed, *others = said
        if not 1 <= wanted <= _MOST_IN_HAND:
            raise CommunicationError(f"worker {number} says that it wants {wanted} tasks in hand")
        try:
            is_open, count = self._in_hand.meet(number, wanted=wanted, pushed=pushed, others=others)
        except ValueError as error:
            raise CommunicationError(str(error)) from None
        self._send(number, torch.tensor([int(is_open)]), messages.VERDICT_OF_PUSH)
        if count:
            self._give(number, with_weights=bool(wants_weights), count=count)
        else:
            self._expect_next(number)
        self._wake()

    def _check(self, number: int, push: Push) -> None:
        """Refuse a gradient of weights that this server has not sent."""
        if not 0 <= push.first_version <= push.later_version <= self._version:
            versions = f"{push.first_version} and {push.later_version}"
            raise CommunicationError(
                f"worker {number} brings a gradient of versions {versions} in step {self._ctx.step}"
            )

    def _wake(self) -> None:
        """Give tasks to those that wait for one, as long as there are some; if no step is left, let them end."""
        for number, with_weights in list(self._parked.items()):
            if not self._in_hand.has_more:
                return
            del self._parked[number]
            self._give(number, with_weights=with_weights)

    def _give(self, number: int, *, with_weights: bool, count: int = 1) -> None:
        """Answer with tasks; a worker without any waits for one, unless no step is left."""
        tasks = self._in_hand.hand_out(number, count=count)
        if tasks is None:
            self._parked[number] = with_weights
            return
        if self._in_hand.is_ending and not self._in_hand.has_some(number):
            self._dismissed.add(number)
        self._expect_next(number)
        self._send(number, torch.tensor([*tasks, *[0] * (_MOST_IN_HAND - count), self._version]), messages.ANSWERS)
        if with_weights:
            self._send(number, self._model.weights_N.clone(), messages.PULLED)

    def _expect_next(self, number: int) -> None:
        if self._in_hand.has_some(number):
            self._expect(number, self._buffers[number], messages.PUSHES)

    def _send(self, number: int, tensor: Tensor, tag: int) -> None:
        with operation(self._ctx, "weights" if tag == messages.PULLED else "answers"):
            sending = self._ctx.isend(tensor, dest=self._ranks[number], tag=tag)
        kept: Iterable[tuple[Pending, Tensor]] = self._sending.get(number, [])
        self._sending[number] = [*((one, held) for one, held in kept if not one.test()), (sending, tensor)]
