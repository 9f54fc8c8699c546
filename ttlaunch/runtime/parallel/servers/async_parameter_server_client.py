"""The worker's side of an asynchronous parameter server: it pushes gradients and rarely waits.

Shapes: N = values of the flat vector.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Pending
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.compression.codec import build_codec
from ttlaunch.runtime.parallel.servers import messages
from ttlaunch.runtime.parallel.servers.owners import note_lost_remainders
from ttlaunch.runtime.parallel.servers.pushes import Push, pack_push
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.spec.recipe.sections import CompressionConfig


class AsyncParameterServerClient:
    """Pushes a worker's gradients to an `AsyncParameterServer`, and receives tasks and weights from it.

        client = AsyncParameterServerClient(ctx, model, pull_interval=N, is_ahead=True, compression=cfg.compression_config)
        client.register()                    # first weights, first tasks
        while task := client.next_task():    # a step whose data this worker computes
            ...                              # `client.advance()` after each micro-batch
            client.push(task, loss=loss, tokens=tokens)      # the mean gradient is in `model.grads_N`

    With `is_ahead`, the worker has the next task before it has finished the current one. It receives the answer to a push only
    after the first micro-batch of the next task; usually the answer has then arrived. The price is that this micro-batch
    uses older weights. Without `is_ahead`, the worker waits for every answer. An answer contains a further task and, after
    every `pull_interval` pushes, the server's weights.

    Cost of a task: one message of S = 4N bytes to the server, or fewer with a codec; 16 bytes back, and every
        `pull_interval` tasks S bytes more. Buffers for the gradient that is being sent and, when pulling, for the
        weights that are being received.
    Order: what a worker computes depends on the order in which the server answers, but not on time.

    Attributes:
        version: The number of updates in the model's weights.
        waited_s: Seconds since `register` in which this worker could only wait.
    """

    def __init__(
        self, ctx: RankContext, model: Model, *, pull_interval: int, is_ahead: bool, compression: CompressionConfig
    ) -> None:
        """Create the client; nothing is sent before `register`."""
        self._ctx, self._model, self._server = ctx, model, ctx.sole("server")
        self._pull_interval, self._is_ahead = pull_interval, is_ahead
        self._compression = compression
        self._codec = build_codec(compression, model.grads_N.numel(), device=ctx.device)
        self._tasks: deque[int] = deque()
        self._under_way: list[Pending] = []
        self._kept: list[Tensor] = []
        self._incoming_N = torch.empty_like(model.weights_N)
        self._answer = torch.empty(2, dtype=torch.int64)
        self._brings_weights = False
        self._pushes = 0
        self._began = time.monotonic()
        self._versions: list[int] = []  # of the weights that each micro-batch of the task was computed with
        self.version = 0
        self.waited_s = 0.0

    @property
    def idle_share(self) -> float:
        """The share of the time since `register` in which this worker could only wait."""
        return self.waited_s / (time.monotonic() - self._began)

    def register(self) -> None:
        """Register with the server, and wait for its weights and the first tasks; call once, before anything else.

        Cost: 8 bytes (int64) out; back S bytes (float32), and 16 bytes (int64) for each task.
        """
        note_lost_remainders(self._ctx, self._compression)
        hello = torch.tensor([1 + self._is_ahead])  # tasks that it wants in hand
        with operation(self._ctx, "registration"):
            self._ctx.send(hello, dest=self._server, tag=messages.REGISTER)
        self._begin_receive_answer(with_weights=True)
        self._take_answer()
        if self._is_ahead:
            self._begin_receive_answer(with_weights=False)
            self._take_answer()
        self._began, self.waited_s = time.monotonic(), 0.0

    def next_task(self) -> int:
        """Return the step whose data this worker computes next; 0 when no step is left for it.

        Cost: no message of its own; it may wait for the answer to the last push.
        """
        while not self._tasks and self._under_way:
            self._take_answer()
        self._versions = []
        return self._tasks.popleft() if self._tasks else 0

    def push(self, task: int, *, loss: float, tokens: int) -> None:
        """Begin to send the gradient in `model.grads_N`, which is zeroed.

        Args:
            task: The step whose data the gradient was computed from.
            loss: The mean loss per token.
            tokens: The number of tokens.

        Cost: one message of a header and the codec's payload (uint8); the client begins to receive the answer.
        """
        payload = self._codec.encode(self._model.take_gradients())
        self._model.zero_grad()
        version = sum(self._versions) / len(self._versions)
        self._pushes += 1
        wants_weights = self._pushes % self._pull_interval == 0
        message = pack_push(Push(task, version, tokens, loss, wants_weights), payload)
        with operation(self._ctx, "pushes"):
            self._under_way = [self._ctx.isend(message, dest=self._server, tag=messages.PUSHES)]
        self._ctx.traffic.note(pushes=1)
        self._kept = [message]
        self._begin_receive_answer(with_weights=wants_weights)
        if not self._is_ahead:
            self._take_answer()

    def advance(self) -> None:
        """Note that a micro-batch of the task is done, and advance transfers that need this rank to do so.

        Cost: no message; after the task's first micro-batch it may wait for the answer to the last push.
        """
        self._versions.append(self.version)
        if len(self._versions) == 1 and self._under_way:
            self._take_answer()
        for transfer in self._under_way:
            transfer.test()

    def _begin_receive_answer(self, *, with_weights: bool) -> None:
        """Begin to receive an answer, and the weights that come with it."""
        self._brings_weights = with_weights
        with operation(self._ctx, "answers"):
            self._under_way.append(self._ctx.irecv(self._answer, source=self._server, tag=messages.ANSWERS))
        if with_weights:
            with operation(self._ctx, "weights"):
                self._under_way.append(self._ctx.irecv(self._incoming_N, source=self._server, tag=messages.PULLED))

    def _take_answer(self) -> None:
        began = time.monotonic()
        _wait_all(self._under_way)
        self.waited_s += time.monotonic() - began
        self._under_way, self._kept = [], []
        task, version = self._answer.tolist()
        if task:
            self._tasks.append(task)
        if self._brings_weights:
            self._model.weights_N.copy_(self._incoming_N)
            self.version = version


def _wait_all(pending: Sequence[Pending]) -> None:
    for transfer in pending:
        transfer.wait()


@contextmanager
def slowed(factors: Mapping[int, float], place: int) -> Iterator[None]:
    """Make a block take several times as long, for experiments with stragglers; meanwhile the rank sleeps.

    Args:
        factors: The factor for each slow worker, by its position among the workers; others run at their own speed.
        place: The position of this worker.
    """
    began = time.monotonic()
    yield
    if place in factors:
        time.sleep((factors[place] - 1) * (time.monotonic() - began))
