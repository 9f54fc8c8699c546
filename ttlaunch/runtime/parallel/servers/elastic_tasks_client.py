"""A worker of an asynchronous parameter server in an elastic run: it says what it has when the members change, and goes on.

Shapes: N = values of the flat vector.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from ttlaunch.membership.messages import Begin
from ttlaunch.runtime.comm.protocol import CommunicationError, Pending
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.elastic.member import INTERRUPTIONS, ElasticMember
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.servers import messages
from ttlaunch.runtime.parallel.servers.pushes import Push, pack_push
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

_SERVER = Rank(0)


class ElasticTaskClient:
    """Has the calls of `AsyncParameterServerClient`; a task that has begun goes on whatever the members do.

    Cost of a task: one message of a header and S = 4N bytes to the server, 24 bytes back, and every `pull_interval` tasks
        S bytes more. A change of the members costs 40 bytes out and 8 back, and once more whatever was under way.
    Order: what a worker computes depends on the order in which the server answers, but not on time.

    Attributes:
        version: The number of updates in the model's weights.
        waited_s: Seconds in which this worker could only wait for the server.
    """

    def __init__(self, ctx: RankContext, model: Model, *, pull_interval: int, is_ahead: bool) -> None:
        """Create the client; nothing is sent before `register`. Arguments are those of `AsyncParameterServerClient`.

        Raises:
            ValueError: The run is not elastic.
        """
        if ctx.elastic is None:
            raise ValueError("this client needs a run that was started with `--elastic`")
        self._ctx, self._model = ctx, model
        self._member: ElasticMember = ctx.elastic
        self._pull_interval, self._wanted = pull_interval, 1 + is_ahead
        self._tasks: deque[int] = deque()
        self._task = self._pushed = self._pushes = 0
        self._message = torch.empty(0)  # the last gradient, until the server has answered
        self._brings_weights: bool | None = True  # the next answer; None: none is due
        self._under_way: list[Pending] = []
        self._answer, self._incoming_N = torch.empty(3, dtype=torch.int64), torch.empty_like(model.weights_N)
        self._has_met = False
        self._versions: list[int] = []
        self._began = time.monotonic()
        self.version, self.waited_s = 0, 0.0
        self._member.follow(self._begin_epoch)

    @property
    def idle_share(self) -> float:
        """The share of the time since `register` in which this worker could only wait."""
        return self.waited_s / (time.monotonic() - self._began)

    def register(self) -> None:
        """Take part, and wait for the server's weights and the first tasks.

        Cost: 40 bytes (int64) out; back 8 and 24 bytes (int64), and S bytes (float32).

        Raises:
            LeftError: The run needs this worker no more.
        """
        self._member.take_tasks()
        self._member.join(None, applied=None)
        self._take_answer()
        self._began, self.waited_s = time.monotonic(), 0.0

    def next_task(self) -> int:
        """Return the step whose data this worker computes next; 0 when no step is left for it.

        Cost: no message of its own; it may wait for the answer to the last push.
        """
        while not self._tasks and self._brings_weights is not None:
            self._take_answer()
        self._versions, self._task = [], self._tasks.popleft() if self._tasks else 0
        return self._task

    def advance(self) -> None:
        """Note that a micro-batch of the task is done; after the first one, wait for the answer to the last push.

        Cost: no message, unless the members have changed.
        """
        self._versions.append(self.version)
        if len(self._versions) == 1 and self._brings_weights is not None:
            self._take_answer()
        else:
            self._insist(lambda: None)

    def push(self, task: int, *, loss: float, tokens: int) -> None:
        """Begin to send the gradient in `model.grads_N`, which is zeroed; the arguments are those of `AsyncParameterServerClient.push`.

        Cost: one message of a header and S bytes (uint8); the client begins to receive the answer.
        """
        self._pushes += 1
        wants_weights = self._pushes % self._pull_interval == 0
        version = sum(self._versions) / len(self._versions)
        push = Push(task, version, tokens, loss, wants_weights, self._versions[0], self._versions[-1])
        gradient = self._model.take_gradients().view(torch.uint8)
        self._message = pack_push(push, gradient)
        self._model.zero_grad()
        self._task, self._pushed, self._brings_weights = 0, task, wants_weights

        def begin() -> None:
            if not self._under_way:
                self._send_push()
                self._begin_receive()

        self._insist(begin)
        if self._wanted == 1:
            self._take_answer()

    def each(self, micro_batches: int) -> Iterator[int]:
        """Go through the micro-batches of a task, whatever the members do meanwhile."""
        return self._member.each(range(micro_batches), to_the_end=True)

    def stay(self) -> None:
        """After the last task, wait until all members have ended."""
        self._member.stay(self.farewell)

    def farewell(self) -> None:
        """Have the server know in every further epoch that this worker has no task any more.

        Cost: 40 bytes (int64) out and 8 back, in each epoch.

        Raises:
            EpochOverError, PeerLostError: The members change.
        """
        if not self._has_met:
            self._brings_weights = False
            self._meet()
            self._finish_transfers()

    def _finish_transfers(self) -> None:
        for one in self._under_way:
            one.wait()

    def _take_answer(self) -> None:
        began = time.monotonic()
        self._insist(self._finish_transfers)
        self.waited_s += time.monotonic() - began
        *tasks, version = self._answer.tolist()
        self._tasks.extend(task for task in tasks if task)
        if self._brings_weights:
            self._model.weights_N.copy_(self._incoming_N)
            self.version = version
        self._under_way, self._brings_weights, self._pushed = [], None, 0

    def _insist(self, act: Callable[[], object]) -> None:
        """Act among the members as they are, however often they change meanwhile."""
        while True:
            try:
                self._meet()
                act()
            except INTERRUPTIONS:
                self._member.regroup()
            else:
                return

    def _begin_epoch(self, begin: Begin, _place: int) -> None:
        """Forget what was under way.

        Raises:
            CommunicationError: The server is gone.
        """
        if begin.numbers[0] != 0:
            raise CommunicationError("the server of this run is gone, and it alone had the weights")
        self._has_met, self._under_way = False, []

    def _meet(self) -> None:
        """Tell the server once in an epoch what this worker has, and send and receive again what was under way."""
        self._member.begin  # noqa: B018 - it raises
        if self._has_met:
            return
        held = [self._pushed, self._task, self._tasks[0] if self._tasks else 0]
        with operation(self._ctx, "registration"):
            hello = torch.tensor([self._wanted, int(bool(self._brings_weights)), *held])
            self._ctx.send(hello, dest=_SERVER, tag=messages.REGISTER)
            verdict = torch.empty(1, dtype=torch.int64)
            self._ctx.recv(verdict, source=_SERVER, tag=messages.VERDICT_OF_PUSH)
        if self._brings_weights is not None:
            if verdict.item():
                self._send_push()
            self._begin_receive()
        self._has_met = True

    def _send_push(self) -> None:
        with operation(self._ctx, "pushes"):
            self._under_way.append(self._ctx.isend(self._message, dest=_SERVER, tag=messages.PUSHES))

    def _begin_receive(self) -> None:
        with operation(self._ctx, "answers"):
            self._under_way.append(self._ctx.irecv(self._answer, source=_SERVER, tag=messages.ANSWERS))
        if self._brings_weights:
            with operation(self._ctx, "weights"):
                self._under_way.append(self._ctx.irecv(self._incoming_N, source=_SERVER, tag=messages.PULLED))


def parts_of(push: Push, *, micro_batches: int) -> list[tuple[int, int, int]]:
    """Return a task's micro-batches in rows, each with the version of its weights; see `RankContext.report_update`."""
    if micro_batches == 1 or push.first_version == push.later_version:
        return [(0, micro_batches, push.first_version)]
    return [(0, 1, push.first_version), (1, micro_batches, push.later_version)]
