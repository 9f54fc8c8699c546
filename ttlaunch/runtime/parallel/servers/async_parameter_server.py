"""An asynchronous parameter server: it serves workers in the order in which they send, and no worker waits for another.

Shapes: N = values of the flat vector, W = workers, S = 4N = bytes of the weights in float32.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ttlaunch.membership.tasks import TaskList
from ttlaunch.runtime.comm.protocol import CommunicationError, Pending
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.compression.codec import build_codec
from ttlaunch.runtime.parallel.servers import messages
from ttlaunch.runtime.parallel.servers.pushes import HEADER_BYTES, Push, read_push
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import CompressionConfig


class AsyncParameterServer:
    """Serves weights and tasks to `AsyncParameterServerClient`s, and receives their gradients in any order.

        server = AsyncParameterServer(ctx, model, tasks, compression=cfg.compression_config)
        server.register_workers()
        for step in ctx.steps(cfg):
            worker, push = server.next_push()      # the gradient is in `model.grads_N`
            ...                                    # the update
            server.answer(worker, push, version=step)
        server.dismiss()

    Cost: for each gradient, the server receives one message of a header and S bytes, or fewer with a codec. It answers with
        16 bytes, and with S bytes more if the worker asks for weights. Memory: for each worker, a buffer for its next
        message and a copy of the weights that are being sent to it.
    Order: the server applies gradients in the order in which they arrive, so two runs end with different bits. The run's
        records contain this order. A run that repeats another one applies gradients in the recorded order and ends with
        the same bits, because the result depends on nothing else that varies.
    Source: J. Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012: Downpour SGD, with one server.
    """

    def __init__(self, ctx: RankContext, model: Model, tasks: TaskList, *, compression: CompressionConfig) -> None:
        """Create the server; nothing is sent before `register_workers`.

        Args:
            ctx: The context of this server.
            model: The model whose weights it keeps.
            tasks: The steps that it hands out to workers.
            compression: How workers compress gradients.
        """
        self._ctx, self._model, self._tasks = ctx, model, tasks
        self._workers = ctx.ranks("worker")
        size = model.grads_N.numel()
        # Error feedback belongs to the sender; a server only decodes.
        self._codec = build_codec(compression.model_copy(update={"error_feedback": False}), size, device=ctx.device)
        payload = self._codec.payload_bytes(size)
        ctx.traffic.note(payload_bytes=payload)
        room = HEADER_BYTES + payload
        self._buffers = {worker: torch.empty(room, dtype=torch.uint8, device=ctx.device) for worker in self._workers}
        self._receiving: dict[Rank, Pending] = {}
        self._in_hand = dict.fromkeys(self._workers, 0)
        self._sending: dict[Rank, list[tuple[Pending, Tensor]]] = {worker: [] for worker in self._workers}
        self._replay = deque(Rank(rank) for rank in ctx.replay)

    def register_workers(self) -> None:
        """Wait for all workers to register, then send each the weights and the number of tasks that it keeps in advance.

        Cost: a message of 8 bytes (int64) from each worker; to each 16 bytes (int64) for every task and once S bytes
            (float32).
        """
        wanted = {worker: torch.empty(1, dtype=torch.int64) for worker in self._workers}
        for worker, buffer in wanted.items():
            with operation(self._ctx, "registration"):
                self._ctx.recv(buffer, source=worker, tag=messages.REGISTER)
        for number in range(max(int(buffer.item()) for buffer in wanted.values())):
            for worker in [worker for worker, buffer in wanted.items() if number < int(buffer.item())]:
                self._send_answer(worker, self._tasks.hand_out(), self._ctx.steps_done, with_weights=number == 0)
        for worker in self._workers:
            self._begin_receive(worker)

    def next_push(self, meanwhile: Callable[[], bool] | None = None) -> tuple[Rank, Push]:
        """Take the gradient that arrives next, from any worker, and leave it in `model.grads_N`.

        Args:
            meanwhile: Other work in small parts: each call does one part and returns whether it found any work. It is
                called until a gradient arrives or no work is left; without work, the server sleeps until one arrives.

        Returns:
            The worker, and what it sent besides the gradient.

        Raises:
            CommunicationError: The gradient's version is none of those that this server has sent.

        Cost: one message in, of a header and the codec's payload (uint8).
        """
        worker = self._replay.popleft() if self._replay else self._wait_for_any(meanwhile)
        push, payload = self._take(worker)
        if not 0 <= push.version < self._ctx.step:
            raise CommunicationError(
                f"rank {worker} brings a gradient of version {push.version} in step {self._ctx.step}"
            )
        self._codec.decode(payload, self._model.grads_N)
        return worker, push

    def answer(self, worker: Rank, push: Push, *, version: int) -> None:
        """Give the worker its next task, and the weights if it asked for them.

        Args:
            worker: The worker whose gradient has been applied.
            push: What the worker sent besides the gradient.
            version: Updates that the weights have seen.

        Cost: one message of 16 bytes (int64), and one of S bytes (float32) if the worker asked for weights.
        """
        self._tasks.close(push.task)
        self._send_answer(worker, self._tasks.hand_out(), version, with_weights=push.wants_weights)
        self._begin_receive(worker)

    def dismiss(self) -> None:
        """Let all workers end: receive and drop the remaining gradients, and answer that no task is left.

        Cost: as `next_push` and `answer`, for each task that workers still have in hand.
        """
        while self._receiving:
            worker = self._wait_for_any(None)
            push, _ = self._take(worker)
            self._send_answer(worker, 0, self._ctx.step, with_weights=push.wants_weights)
            self._begin_receive(worker)
        for worker in self._workers:
            self._finish_sends(worker)

    def _begin_receive(self, worker: Rank) -> None:
        """Begin to receive the worker's next push, if it has something to compute."""
        if self._in_hand[worker]:
            with operation(self._ctx, "pushes"):
                self._receiving[worker] = self._ctx.irecv(self._buffers[worker], source=worker, tag=messages.PUSHES)

    def _wait_for_any(self, meanwhile: Callable[[], bool] | None) -> Rank:
        """Wait for a gradient from any worker; if several have arrived, choose the worker that was served longest ago."""
        waiting = list(self._receiving)
        pending = [self._receiving[worker] for worker in waiting]
        with operation(self._ctx, "pushes"):
            place = self._ctx.wait_any(pending, timeout_s=0)
            while place is None and meanwhile is not None and meanwhile():
                place = self._ctx.wait_any(pending, timeout_s=0)
            if place is None:
                place = self._ctx.wait_any(pending)
        assert place is not None  # noqa: S101 - nothing limits the time
        return waiting[place]

    def _take(self, worker: Rank) -> tuple[Push, Tensor]:
        with operation(self._ctx, "pushes"):
            self._receiving.pop(worker).wait()
        self._in_hand[worker] -= 1
        return read_push(self._buffers[worker])

    def _send_answer(self, worker: Rank, task: int, version: int, *, with_weights: bool) -> None:
        """Begin to send an answer. The weights are copied first, because the next update does not wait for this worker."""
        self._finish_sends(worker)
        self._in_hand[worker] += bool(task)
        answer = torch.tensor([task, version])
        with operation(self._ctx, "answers"):
            self._sending[worker].append((self._ctx.isend(answer, dest=worker, tag=messages.ANSWERS), answer))
        self._ctx.traffic.note(**{f"answers_to_{worker}": 1})
        if with_weights:
            weights_N = self._model.weights_N.clone()
            with operation(self._ctx, "weights"):
                self._sending[worker].append((self._ctx.isend(weights_N, dest=worker, tag=messages.PULLED), weights_N))
            self._ctx.traffic.note(**{f"weights_to_{worker}": 1})

    def _finish_sends(self, worker: Rank) -> None:
        """Finish sending the previous answer, which the worker has received if it has pushed since."""
        for sending, _ in self._sending[worker]:
            sending.wait()
        self._sending[worker] = []


def step_size(staleness: float, rule: Literal["inverse", "constant"]) -> float:
    """Return the factor of the learning rate for a stale gradient: always 1, or 1 / staleness if the staleness exceeds 1.

    Source: W. Zhang, S. Gupta, X. Lian, J. Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016.

    >>> [step_size(staleness, "inverse") for staleness in (0, 1, 2, 4)]
    [1.0, 1.0, 0.5, 0.25]
    """
    return 1.0 if rule == "constant" else 1.0 / max(1, staleness)


class StalenessCounts:
    """Count the staleness of every gradient that was applied.

    Staleness is the number of updates between the weights that a gradient was computed with and the weights it changes.
    """

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, staleness: float) -> None:
        """Count one gradient."""
        self._counts[staleness] += 1

    @property
    def average(self) -> float:
        """The mean staleness; 0 if no gradient was applied."""
        return sum(staleness * count for staleness, count in self._counts.items()) / max(1, self._counts.total())

    @property
    def maximum(self) -> float:
        return max(self._counts, default=0)

    def histogram(self) -> str:
        """Render how many gradients had which staleness, rounded down, such as `0: 1, 3: 140`."""
        whole: Counter[int] = Counter()
        for staleness, count in self._counts.items():
            whole[int(staleness)] += count
        return ", ".join(f"{staleness}: {count}" for staleness, count in sorted(whole.items()))
