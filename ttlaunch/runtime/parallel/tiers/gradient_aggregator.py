"""The aggregator's side of the messages with workers: gradients arrive and new weights leave, both bucket by bucket.

Shapes: N = values of the flat vectors, K = nodes of the tree that a worker's block of micro-batches makes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ttlaunch.runtime.comm.agreement import SharedState, agree
from ttlaunch.runtime.comm.protocol import CommunicationError, Communicator, Pending
from ttlaunch.runtime.comm.reduction import aligned_subtrees, mean_per_token
from ttlaunch.runtime.comm.tree_exchange import add_up
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.bucket_messages import (
    COUNTS,
    GRADIENTS,
    WEIGHTS,
    Outbox,
    irecv_part,
    send_bucket_size,
)
from ttlaunch.runtime.parallel.gradients.bucket_tuning import BucketTuner
from ttlaunch.runtime.parallel.gradients.buckets import Bucket, cut_buckets
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

_WINDOW = 2
"""Buckets whose messages may arrive at the same time: while one is added up, the next is on its way."""


class GradientAggregator:
    """Adds up the gradients of several `RemoteOptimizer`s, and sends them the new weights.

        aggregator = GradientAggregator(model.parameters(), ctx=ctx, workers=blocks)
        aggregator.send_first_weights()
        for step in ctx.steps(cfg):
            loss, tokens = aggregator.begin_step()
            for bucket in aggregator.mean_gradients():
                ...                      # the bucket's part of the mean is in the parameters' gradients
            for bucket in aggregator.buckets:
                ...                      # its weights have been updated
                aggregator.send_weights(bucket)
            aggregator.end_step()

    Cost of a step with W workers: W * K * S bytes in, W * S out, S = 4N. Buffers for two buckets of each node.
    Order: that of the tree over micro-batches, then one division: the same bits for any number of workers.

    Attributes:
        buckets: The buckets of the current step, in the order in which gradients arrive.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        ctx: Communicator,
        workers: Mapping[Rank, range],
        bucket_megabytes: float | None = None,
        followers: Iterable[Rank] = (),
        shared: SharedState | None = None,
    ) -> None:
        """Plan the messages for these parameters; nothing is sent.

        Args:
            parameters: Equal in number, order and shape to those of the workers.
            ctx: The communicator of this rank.
            workers: The block of micro-batches of each rank that sends, in the order of the blocks, which leave no gaps.
            bucket_megabytes: The size of a bucket; None: this rank times the first steps and decides.
            followers: Further ranks that need to know the buckets.
            shared: A state that is sent with the weights, such as the model's loss scale.
        """
        self._flat = FlatParameters(parameters)
        self._ctx = ctx
        self._nodes_of = {rank: list(aligned_subtrees(block)) for rank, block in workers.items()}
        self._nodes = [(rank, leaves) for rank, nodes in self._nodes_of.items() for leaves in nodes]
        self._workers = tuple(workers)
        self._shared = shared
        self._followers = (*workers, *followers)
        self._tuner = BucketTuner(self._flat.grads_N.nbytes, bucket_megabytes=bucket_megabytes)
        self._is_settled = False
        self._weights = Outbox(ctx, self._flat.weights_N, dests=self._workers, tag=WEIGHTS)
        self._updated: set[int] = set()
        self._unsent = 0
        self._buffers: list[list[Tensor]] = []
        self._divisor = 1
        self.buckets: list[Bucket] = []

    def send_first_weights(self) -> None:
        """Send the weights that training begins with to all workers.

        Cost: one message of S bytes (float32) to each worker; the `shared` state, if there is one.
        """
        (whole,) = cut_buckets(self._flat.starts, bucket_bytes=self._flat.weights_N.nbytes)
        self._weights.send(whole)
        self._weights.wait()
        agree(self._ctx, self._shared, dests=self._workers)

    def begin_step(self) -> tuple[float, int]:
        """Agree on the buckets of the step, and wait until every worker has computed its loss.

        Returns:
            Mean loss per token and number of tokens of the whole step.

        Raises:
            CommunicationError: A worker sends the sums of other micro-batches than its block.

        Cost: one message of 32K bytes from each worker; in the first steps one of 16 bytes to each.
        """
        self.agree_on_buckets()
        return self.receive_losses()

    def agree_on_buckets(self) -> None:
        """Send the buckets' size until it is final: the first half of `begin_step`, in which no worker waits for another.

        Cost: in the first steps one message of 16 bytes to each worker and follower; then none.
        """
        if not self._is_settled:
            self._is_settled = self._tuner.is_final
            self.buckets = cut_buckets(self._flat.starts, bucket_bytes=self._tuner.bucket_bytes)
            room = max(len(bucket.values) for bucket in self.buckets)
            slots = min(_WINDOW, len(self.buckets))
            like = self._flat.grads_N
            self._buffers = [[like.new_empty(room) for _ in self._nodes] for _ in range(slots)]
            send_bucket_size(self._ctx, torch.tensor([self._tuner.bucket_bytes, self._is_settled]), self._followers)
        self._updated.clear()
        self._unsent = len(self.buckets)

    def receive_losses(self) -> tuple[float, int]:
        """Wait until every worker has sent its loss: the second half of `begin_step`.

        Raises:
            CommunicationError: A worker sends the sums of other micro-batches than its block.

        Cost: one message of 32K bytes (float64) from each worker.
        """
        total = self._receive_counts()
        tokens, loss = int(total[0].item()), total[1].item()
        self._divisor = max(1, tokens)
        return mean_per_token(loss, tokens), tokens

    def mean_gradients(self) -> Iterator[Bucket]:
        """Yield each bucket when its part of the gradient of the mean loss is in `parameter.grad`; call after `begin_step`.

        Cost: from each worker K messages of each bucket's bytes (float32).
        """
        waiting = deque(self._begin_receives(bucket) for bucket in self.buckets[:_WINDOW])
        for bucket in self.buckets:
            sum_N = add_up(waiting.popleft())
            torch.div(sum_N, self._divisor, out=bucket.of(self._flat.grads_N))
            if bucket.index + _WINDOW < len(self.buckets):
                waiting.append(self._begin_receives(self.buckets[bucket.index + _WINDOW]))
            yield bucket

    def send_weights(self, bucket: Bucket) -> None:
        """Send the bucket's weights, which are final for this step, to all workers.

        Call this for the buckets in any order. They are sent in the order in which a forward pass reads them: the last
        bucket first.

        Cost: one message of the bucket's bytes (float32) to each worker.
        """
        self._updated.add(bucket.index)
        while self._unsent and self._unsent - 1 in self._updated:
            self._unsent -= 1
            self._weights.send(self.buckets[self._unsent])

    def end_step(self) -> None:
        """Return when all sends of weights are complete.

        Cost: no message except the `shared` state to each worker, if there is one.
        """
        agree(self._ctx, self._shared, dests=self._workers)
        self._weights.wait()
        self._tuner.end_step()

    def _receive_counts(self) -> Tensor:
        """Return tokens and summed loss of the step, shape (2,), added along the tree."""
        found: list[tuple[Rank, Tensor, Pending]] = []
        with operation(self._ctx, "counts"):
            for worker in self._workers:
                buffer = torch.empty(len(self._nodes_of[worker]), 4, dtype=torch.float64)
                found.append((worker, buffer, self._ctx.irecv(buffer, source=worker, tag=COUNTS)))
            for worker, rows, message in found:
                message.wait()
                self._check_counts(worker, rows)
        rows = torch.cat([rows for _, rows, _ in found])[:, 2:]
        return add_up((leaves, row, None) for (_, leaves), row in zip(self._nodes, rows, strict=True))

    def _check_counts(self, worker: Rank, rows: Tensor) -> None:
        expected = self._nodes_of[worker]
        sent = [range(int(start), int(start + size)) for start, size in rows[:, :2].tolist()]
        if sent != expected:
            raise CommunicationError(f"rank {worker} brings the sums over {sent}, expected {expected}")

    def _begin_receives(self, bucket: Bucket) -> list[tuple[range, Tensor, Pending | None]]:
        buffers = self._buffers[bucket.index % len(self._buffers)]
        arriving: list[tuple[range, Tensor, Pending | None]] = []
        for (worker, leaves), buffer in zip(self._nodes, buffers, strict=True):
            part = buffer[: len(bucket.values)]
            arriving.append((leaves, part, irecv_part(self._ctx, part, bucket, source=worker, tag=GRADIENTS)))
        return arriving
