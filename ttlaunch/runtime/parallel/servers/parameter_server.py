"""A synchronous parameter server: each update uses only gradients of the current step, from all workers or those in time.

Shapes: N = values of the server's shard, V = micro-batches of a validation, W = workers.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ttlaunch.errors import TtlaunchError
from ttlaunch.runtime.comm.agreement import agree
from ttlaunch.runtime.comm.protocol import Pending
from ttlaunch.runtime.comm.reduction import aligned_subtrees, contiguous_blocks, mean_per_token
from ttlaunch.runtime.comm.tree_exchange import add_up
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.compression.codec import build_codec
from ttlaunch.runtime.parallel.servers import messages
from ttlaunch.runtime.parallel.servers.messages import (
    Verdict,
    check_counts,
    empty_counts,
    pack_order,
    pack_verdict,
    read_order,
)
from ttlaunch.runtime.parallel.servers.owners import owners_of_checkpoints
from ttlaunch.runtime.parallel.servers.shard import ParameterShard
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import CompressionConfig

_MOST_AT_ONCE = 64
"""For so many workers at a time a server waits that needs all of them."""


class StragglerError(TtlaunchError):
    """A worker's gradient did not come in time, and the configuration ends the run in this case."""

    message_is_complete = True


class Patience(NamedTuple):
    """What a server does about workers that are late.

    Attributes:
        policy: `wait` for them, `drop` their gradient of the step, or `fail`.
        timeout_s: A worker is late if this much time has passed since the last gradient of the step arrived.
    """

    policy: Literal["wait", "drop", "fail"]
    timeout_s: float


class ParameterServer:
    """Averages the gradients of `ParameterServerClient`s for one shard of the weights, and sends updated weights back.

        server = ParameterServer(ctx, shard, micro_batches=M, patience=patience, compression=cfg.compression_config)
        server.send_first_weights()
        for step in ctx.steps(cfg):
            loss, tokens = server.mean_gradient(step)      # the barrier; the gradient is in `shard.grads_N`
            ...                                            # the update
            server.send_weights(step)
        server.dismiss()

    The first server decides whose gradients a step uses, and sends its decision to the other servers. A worker that was
    dropped sends its gradient later. The server refuses this gradient and sends the worker the newest weights, with which
    it takes part in the next step.

    Cost of a step: the server receives W * K * S bytes and sends W * S, where S = 4N. It has buffers for all gradients of its
        shard in a step.
    Order: the tree over micro-batches. With the gradients of all workers, the result therefore has the bits of one process.
        Without some of them, the sum leaves out their nodes, and the mean counts only the tokens of the others.
    Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, with a barrier in
        every step; dropping late workers as in J. Chen et al., "Revisiting Distributed Synchronous SGD", 2016.

    Attributes:
        owners: The ranks that write checkpoints.
        members: The workers whose gradients are in the last update.
        refused: Gradients that came too late.
    """

    def __init__(
        self,
        ctx: RankContext,
        shard: Model | ParameterShard,
        *,
        micro_batches: int,
        patience: Patience,
        compression: CompressionConfig,
    ) -> None:
        """Create the server; nothing is sent before `send_first_weights`."""
        self._ctx, self._shard, self._patience = ctx, shard, patience
        self._workers, self._servers = ctx.ranks("worker"), ctx.ranks("server")
        self._is_first = ctx.rank == self._servers[0]
        blocks = contiguous_blocks(micro_batches, len(self._workers))
        self._nodes = {
            worker: list(aligned_subtrees(block)) for worker, block in zip(self._workers, blocks, strict=True)
        }
        size = shard.grads_N.numel()
        self._codec = build_codec(compression.model_copy(update={"error_feedback": False}), size, device=ctx.device)
        self._is_lossy = compression.kind != "none"
        self.owners = owners_of_checkpoints(ctx, compression, straggler=patience.policy)
        room = self._codec.payload_bytes(size)
        ctx.traffic.note(payload_bytes=room)
        self._payloads = {
            worker: [torch.empty(room, dtype=torch.uint8, device=ctx.device) for _ in nodes]
            for worker, nodes in self._nodes.items()
        }
        self._receiving: dict[Rank, tuple[Tensor, Pending]] = {}
        self._version = ctx.steps_done
        self.members = self._workers
        self.refused = 0

    def send_first_weights(self) -> None:
        """Send the weights that training begins with to all workers.

        Cost: S bytes (float32) to each worker, and from the first server the loss scale with fp16.
        """
        self._send_weights(self._workers)

    def mean_gradient(self, step: int) -> tuple[float, int]:
        """Wait for the step's gradients and leave their mean in `shard.grads_N`.

        Returns:
            Mean loss per token and number of tokens, over the gradients that the step uses.

        Raises:
            StragglerError: A gradient did not come in time, and the policy is `fail`.
            CommunicationError: A worker sends other micro-batches than its block.

        Cost: each worker sends a message of 40K bytes (float64) and K of the codec's payload (uint8); for each decision
            the first server sends 8 * (1 + W) bytes (int64) to each other one. A refused gradient costs the same, and the
            answer to it contains the weights.
        """
        counts = self._gather(step) if self._is_first else self._follow(step)
        self.members = tuple(worker for worker in self._workers if worker in counts)
        sum_N = add_up(self._arriving(self.members))
        rows = [
            (leaves, row, None)
            for worker in self.members
            for leaves, row in zip(self._nodes[worker], counts[worker][:, 3:], strict=True)
        ]
        tokens, loss = add_up(rows).tolist()
        torch.div(sum_N, max(1, int(tokens)), out=self._shard.grads_N)
        if self._is_lossy and self._shard.loss_scaler.is_on:  # workers have already divided the scale out
            self._shard.grads_N.mul_(self._shard.loss_scaler.scale)
        self._ctx.traffic.note(steps_made=1)
        return mean_per_token(loss, int(tokens)), int(tokens)

    def send_weights(self, step: int) -> None:
        """Send the new weights to the workers whose gradients are in the update.

        Cost: S bytes (float32) to each; from the first server also 8 * (2 + W) bytes (int64) and the loss scale with
            fp16.
        """
        self._answer(self.members, Verdict(step, is_over=False, members=self.members))

    def send_average(self, average_N: Tensor) -> None:
        """Send averaged weights, for a validation, to the workers whose gradients are in the last update.

        Cost: S bytes (float32) to each, who wait for them in `ParameterServerClient.averaged_weights`.
        """
        self._send(average_N, self.members, tag=messages.AVERAGE, name="average")

    def receive_losses(self, validation_micro_batches: int, *, times: int) -> Tensor:
        """Receive the losses of the members' shares of a validation; only the first server calls it.

        Returns:
            Summed losses of the micro-batches in order, shape `(times, V)`, float64.

        Cost: from each member `times` rows of 8 bytes for each micro-batch of its share, in one message.
        """
        blocks = contiguous_blocks(validation_micro_batches, len(self.members))
        found = torch.empty(times, validation_micro_batches, dtype=torch.float64)
        with operation(self._ctx, "validation"):
            for worker, block in zip(self.members, blocks, strict=True):
                share = torch.empty(times, len(block), dtype=torch.float64)
                self._ctx.recv(share, source=worker, tag=messages.VALIDATION)
                found[:, block.start : block.stop] = share
        return found

    def agree_to_go_on(self) -> None:
        """Decide after a validation whether training goes on, and send the decision to other servers and members.

        Every server must call, after the same step.

        Cost: an `agree` from the first server to the others and to all members.
        """
        self._ctx.traffic.note(validations=1, **{f"validations_with_{worker}": 1 for worker in self.members})
        first, others = self._servers[0], self._servers[1:]
        source, dests = (None, (*others, *self.members)) if self._is_first else (first, ())
        agree(self._ctx, self._ctx.early_stop, source=source, dests=dests)

    def dismiss(self) -> None:
        """After the last step, wait for the gradients of late workers and answer them with the last weights.

        Every server must call. Workers can be late only if the policy is `drop`.

        Cost: none; with `drop`, a gradient in and weights out for each late worker, and the decisions to the other
            servers.
        """
        if self._patience.policy != "drop":
            return
        if not self._is_first:
            self._follow(self._version)
            return
        while self._receiving:
            late = self._next_worker(None)
            assert late is not None  # noqa: S101 - nobody limits the time
            self._take_counts(late, newest=self._version)
            self._refuse(late, is_over=True)
        self._order(messages.END, ())

    def _gather(self, step: int) -> dict[Rank, Tensor]:
        """Receive gradients of this step until all workers have sent one, or the timeout has passed."""
        in_time: dict[Rank, Tensor] = {}
        for worker in self._workers:
            self._begin_receive(worker)
        while self._receiving:
            found = self._next_worker(self._patience.timeout_s if self._patience.policy != "wait" and in_time else None)
            if found is None:
                self._report_late([late for late in self._workers if late not in in_time], step)
                break
            counts, of_step = self._take_counts(found, newest=step)
            if of_step == step:
                in_time[found] = counts
            else:
                self._refuse(found, is_over=False)
                self._begin_receive(found)
        # A worker that is late here may be in time at another server, and the shards must all take the same gradients.
        self._order(messages.TAKE, tuple(in_time))
        return in_time

    def _report_late(self, late: Sequence[Rank], step: int) -> None:
        """Report late workers, once each time that a worker falls behind."""
        fails, timeout_s = self._patience.policy == "fail", self._patience.timeout_s
        fresh = [worker for worker in late if fails or worker in self.members]
        named = ", ".join(f"rank {worker} (worker)" for worker in fresh)
        text = f"no gradient of step {step} from {named} within {timeout_s:g} s of the last one that came"
        if fails:
            raise StragglerError(text)
        if fresh:
            whom = "it until it comes" if len(fresh) == 1 else "them until they come"
            self._ctx.note(f"{text}; steps are made without {whom}")

    def _follow(self, newest: int) -> dict[Rank, Tensor]:
        """Follow the first server's orders until it names the workers whose gradients make the step, if any step is left."""
        while True:
            buffer = pack_order(messages.END, (), self._workers)
            with operation(self._ctx, "orders"):
                self._ctx.recv(buffer, source=self._servers[0], tag=messages.ORDER)
            kind, chosen = read_order(buffer, self._workers)
            found = {}
            for worker in chosen:
                self._begin_receive(worker)
                found[worker], _ = self._take_counts(worker, newest=newest)
            if kind != messages.REFUSE:
                return found
            self._refuse(chosen[0], is_over=False)

    def _begin_receive(self, worker: Rank) -> None:
        """Begin to receive the counts of the worker's next gradient, which name its step."""
        # The receive for a worker that was late is still open; it will complete with the worker's next message.
        if worker not in self._receiving:
            buffer = empty_counts(self._nodes[worker])
            with operation(self._ctx, "counts"):
                self._receiving[worker] = buffer, self._ctx.irecv(buffer, source=worker, tag=messages.COUNTS)

    def _next_worker(self, timeout_s: float | None) -> Rank | None:
        """Sleep until the counts of any worker arrive; return None after `timeout_s`."""
        with operation(self._ctx, "counts"):
            # Where all have to come anyway, a few of them will do: a list of thousands, thousands of times, takes minutes.
            most = _MOST_AT_ONCE if self._patience.policy == "wait" else None
            waiting = [message for _, message in itertools.islice(self._receiving.values(), most)]
            place = self._ctx.wait_any(waiting, timeout_s=timeout_s)
        return None if place is None else next(itertools.islice(self._receiving, place, None))

    def _take_counts(self, worker: Rank, *, newest: int) -> tuple[Tensor, int]:
        """Return the counts that a worker has sent, and the step of its gradient."""
        counts, message = self._receiving.pop(worker)
        message.wait()
        return counts, check_counts(counts, self._nodes[worker], worker=worker, newest=newest)

    def _refuse(self, worker: Rank, *, is_over: bool) -> None:
        """Receive a stale gradient, drop it, and send the worker the newest weights."""
        self._order(messages.REFUSE, (worker,))
        for message in self._begin_receive_gradient(worker):
            message.wait()
        self.refused += 1
        self._answer((worker,), Verdict(self._version, is_over=is_over, members=()))

    def _order(self, kind: int, chosen: Sequence[Rank]) -> None:
        """Send an order to the other servers, if this one is the first."""
        if self._is_first:
            self._ctx.traffic.note(orders=1)
            for server in self._servers[1:]:
                with operation(self._ctx, "orders"):
                    self._ctx.send(pack_order(kind, chosen, self._workers), dest=server, tag=messages.ORDER)

    def _begin_receive_gradient(self, worker: Rank) -> list[Pending]:
        with operation(self._ctx, "gradients"):
            return [
                self._ctx.irecv(payload, source=worker, tag=messages.GRADIENTS) for payload in self._payloads[worker]
            ]

    def _arriving(self, members: Sequence[Rank]) -> Iterator[tuple[range, Tensor, None]]:
        """Yield the sums of the members' nodes in the order of the tree, each as soon as it has arrived."""
        # All receives begin first, so that the workers can send at the same time; the sums keep the tree's order.
        receiving = {worker: self._begin_receive_gradient(worker) for worker in members}
        for worker in members:
            for leaves, payload, message in zip(
                self._nodes[worker], self._payloads[worker], receiving[worker], strict=True
            ):
                message.wait()
                sum_N = torch.empty_like(self._shard.grads_N)
                self._codec.decode(payload, sum_N)
                yield leaves, sum_N, None

    def _answer(self, workers: Sequence[Rank], verdict: Verdict) -> None:
        """Send the verdict, from the first server alone, and the weights."""
        self._version = verdict.version
        if self._is_first:
            message = pack_verdict(verdict, self._workers)
            with operation(self._ctx, "verdict"):
                for sending in [self._ctx.isend(message, dest=worker, tag=messages.VERDICT) for worker in workers]:
                    sending.wait()
        self._send_weights(workers)

    def _send_weights(self, workers: Sequence[Rank]) -> None:
        """Send the weights, and from the first server the loss scale."""
        self._send(self._shard.weights_N, workers, tag=messages.WEIGHTS, name="weights")
        if self._is_first:
            agree(self._ctx, self._shard.loss_scaler, dests=workers)

    def _send(self, values_N: Tensor, workers: Sequence[Rank], *, tag: int, name: str) -> None:
        self._ctx.traffic.note(**{f"{name}_to_{worker}": 1 for worker in workers})
        with operation(self._ctx, name):
            for sending in [self._ctx.isend(values_N, dest=worker, tag=tag) for worker in workers]:
                sending.wait()
