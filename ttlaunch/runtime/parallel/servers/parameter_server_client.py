"""The worker's side of synchronous parameter servers: it sends gradients, each with its step, and receives new weights.

Shapes: N = values of the flat vector.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from ttlaunch.runtime.comm.agreement import agree
from ttlaunch.runtime.comm.protocol import Pending
from ttlaunch.runtime.comm.reduction import GradientTree, aligned_subtrees
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.compression.codec import build_codec
from ttlaunch.runtime.parallel.compression.saved import OwedState
from ttlaunch.runtime.parallel.servers import messages
from ttlaunch.runtime.parallel.servers.messages import Verdict, pack_counts, pack_verdict, read_verdict
from ttlaunch.runtime.parallel.servers.owners import note_lost_remainders, owners_of_checkpoints
from ttlaunch.runtime.parallel.servers.shard import cut_values, own_gradients, own_values, second_use_values
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.spec.recipe.sections import CompressionConfig


class ParameterServerClient:
    """Sends a worker's gradients to every `ParameterServer`, and receives new weights from each.

        client = ParameterServerClient(ctx, model, block=block, compression=cfg.compression_config, straggler=keys.straggler)
        client.receive_first_weights()
        for step in ctx.steps(cfg):
            if step > client.version:      # else the others have made this step without this worker
                ...                        # sums of the block's micro-batches
                client.push(step, sums)
                client.pull(sums)
                client.checkpoint(step)    # the remainders of this worker's codecs

    With fp16 and a codec that loses something, the loss scale is divided out before anything is encoded, so the
    remainder, which the worker adds to its next gradient, does not depend on it. If a gradient is refused or its step is
    skipped, nothing that was sent is used, and the worker restores its previous remainder.

    Cost of a step: the worker sends K * S bytes and receives S, where S = 4N and K is the number of nodes of its block; one
        message for each node and server. It has buffers for what it sends.
    Order: the servers add up; see `ParameterServer`.

    Attributes:
        version: The number of updates in this worker's weights.
        members: The workers whose gradients are in the last update; empty if this worker's gradient was refused.
        is_over: Whether the servers make no further step.
    """

    def __init__(
        self,
        ctx: RankContext,
        model: Model,
        *,
        block: range,
        compression: CompressionConfig,
        straggler: Literal["wait", "drop", "fail"],
    ) -> None:
        """Plan the messages; nothing is sent.

        Args:
            ctx: The context of this worker.
            model: The whole model.
            block: The worker's micro-batches of every step.
            compression: How gradients are compressed. What the codec loses of a gradient is added to the next one.
            straggler: What servers do about workers that are late.
        """
        self._ctx, self._model = ctx, model
        self._workers, self._servers = ctx.ranks("worker"), ctx.ranks("server")
        self._parts = cut_values(model, parts=len(self._servers))
        self._gradients = [[part] for part in self._parts]
        if len(self._servers) > 1:
            self._gradients[0].append(second_use_values(model))  # of the matrix that the first server has
        sizes = [sum(map(len, parts)) for parts in self._gradients]
        nodes = list(aligned_subtrees(block))
        self._codecs = [[build_codec(compression, size, device=ctx.device) for size in sizes] for _ in nodes]
        self._straggler, self._compression = straggler, compression
        self._owed = OwedState(
            {
                f"{ctx.position('worker')}of{len(self._workers)}.{node}.{server}of{len(sizes)}": codec
                for node, codecs in enumerate(self._codecs)
                for server, codec in enumerate(codecs)
            }
        )
        self._owners = owners_of_checkpoints(ctx, compression, straggler=straggler)
        self._sending: list[Pending] = []
        self._kept: list[Tensor] = []
        self.version, self.is_over, self.members = Verdict(ctx.steps_done, is_over=False, members=self._workers)

    def receive_first_weights(self) -> None:
        """Receive the first weights; a resumed run also restores the remainders of this worker's codecs from its checkpoint.

        Cost: from each server one message of its shard (float32), S bytes in all; with fp16 the loss scale from the
            first.
        """
        if self._ctx.rank in self._owners and self._ctx.steps_done:
            self._ctx.restore(self._owed, self._owed)
        elif self._straggler == "drop":
            note_lost_remainders(self._ctx, self._compression)
        self._receive_weights(self._model.weights_N, messages.WEIGHTS, "weights")
        agree(self._ctx, self._model.loss_scaler, source=self._servers[0])
        self._compare(self._ctx.steps_done)

    def push(self, step: int, sums: GradientTree) -> None:
        """Begin to send the gradient of a step; `sums` must not change before `pull`.

        Args:
            step: The step that the gradient belongs to; a server that has already made this step refuses the gradient.
            sums: The sums of the worker's whole block, float32.

        Cost: to each server a message of 40K bytes (float64), and K of the codec's payload (uint8).
        """
        counts = pack_counts(step, sums.subtrees())
        self._kept = [counts]
        self._owed.wait_before_encode()
        if self._compression.kind != "none" and self._model.loss_scaler.is_on:
            for node in sums.subtrees():
                node.gradient_N.mul_(1 / self._model.loss_scaler.scale)
        self._ctx.traffic.note(pushes=1)
        for server, parts in enumerate(self._gradients):
            with operation(self._ctx, "counts"):
                self._sending.append(self._ctx.isend(counts, dest=self._servers[server], tag=messages.COUNTS))
            for node, codecs in zip(sums.subtrees(), self._codecs, strict=True):
                payload = codecs[server].encode(own_gradients(node.gradient_N, parts))
                self._kept.append(payload)
                with operation(self._ctx, "gradients"):
                    self._sending.append(self._ctx.isend(payload, dest=self._servers[server], tag=messages.GRADIENTS))

    def pull(self, sums: GradientTree) -> None:
        """Wait for the verdict and the weights that come with it, and set the attributes from the verdict.

        Args:
            sums: The sums that `push` was given; they are emptied.

        Cost: 8 * (2 + W) bytes (int64) from the first server, W = workers; the weights as in `receive_first_weights`.
        """
        buffer = pack_verdict(Verdict(0, is_over=False, members=()), self._workers)
        with operation(self._ctx, "verdict"):
            self._ctx.recv(buffer, source=self._servers[0], tag=messages.VERDICT)
        self.version, self.is_over, self.members = read_verdict(buffer, self._workers)
        self._receive_weights(self._model.weights_N, messages.WEIGHTS, "weights")
        skipped = self._model.loss_scaler.skipped
        agree(self._ctx, self._model.loss_scaler, source=self._servers[0])
        if self._ctx.rank not in self.members or self._model.loss_scaler.skipped > skipped:
            self._owed.take_back()
        for sending in self._sending:
            sending.wait()
        self._sending.clear()
        self._kept.clear()
        sums.clear()

    def checkpoint(self, step: int) -> None:
        """Save the remainders of this worker's codecs, if they have any; the servers save everything else.

        Before that, the worker's copy of the weights is compared with the servers' if that is due. With `straggler: drop`
        it is not: a late worker has older weights.
        """
        self._compare(step)
        if self._ctx.rank in self._owners:
            self._ctx.checkpoint(step, self._owed, self._owed, owners=self._owners)

    def _compare(self, step: int) -> None:
        if self._straggler != "drop":
            self._ctx.compare(step, self._model.named_parameters)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the servers' averaged weights into the model during a block; only members may call, in a validation.

        Cost: S bytes (float32) in, a message from each server; a copy of the model's own weights.
        """
        weights_N = self._model.weights_N.clone()
        self._receive_weights(self._model.weights_N, messages.AVERAGE, "average")
        yield
        self._model.weights_N.copy_(weights_N)

    def send_losses(self, losses_V: Tensor) -> None:
        """Send the first server the losses of this worker's share of a validation, and wait for its decision to go on.

        Args:
            losses_V: The summed loss of each micro-batch, float64, contiguous, with a row for each set of weights.

        Cost: one message of 8 bytes for each loss; an `agree` back.
        """
        self._ctx.traffic.note(losses=losses_V.numel())
        with operation(self._ctx, "validation"):
            self._ctx.send(losses_V, dest=self._servers[0], tag=messages.VALIDATION)
        agree(self._ctx, self._ctx.early_stop, source=self._servers[0])

    @torch.no_grad()
    def _receive_weights(self, into_N: Tensor, tag: int, name: str) -> None:
        with operation(self._ctx, name):
            arriving = [
                self._ctx.irecv(own_values(into_N, part), source=server, tag=tag)
                for server, part in zip(self._servers, self._parts, strict=True)
            ]
            for message in arriving:
                message.wait()
