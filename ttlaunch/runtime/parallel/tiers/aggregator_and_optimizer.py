"""The connection between an aggregator and an optimizer on different ranks: mean gradients one way, new weights back.

Shapes: N = values of the flat vectors, S = 4N, their bytes.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from ttlaunch.runtime.comm.agreement import SharedState, agree
from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.bucket_messages import GRADIENTS, WEIGHTS, AgreedBuckets, Outbox, irecv_bucket
from ttlaunch.runtime.parallel.gradients.buckets import Bucket
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank


class AggregatorToOptimizer:
    """The aggregator's end of the connection: it sends mean gradients to the optimizer and receives new weights.

        link = AggregatorToOptimizer(model.parameters(), ctx=ctx, optimizer=rank)
        link.receive_first_weights()
        for step in ctx.steps(cfg):
            for bucket in ...:
                link.send_gradient(bucket)
            for bucket in link.weights(order):
                ...

    Cost of a step: S bytes each way (float32), in a message for each bucket.
    Order: gradients in the order of the buckets, weights in that of the updates; nothing is added up, so no bit
        changes.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        ctx: Communicator,
        optimizer: Rank,
        shared: SharedState | None = None,
    ) -> None:
        """Plan the messages for these parameters; nothing is sent. A `shared` state comes with the weights."""
        self._shared = shared
        self._flat = FlatParameters(parameters)
        self._ctx = ctx
        self._optimizer = optimizer
        self._gradients = Outbox(ctx, self._flat.grads_N, dests=[optimizer], tag=GRADIENTS)

    def receive_first_weights(self) -> None:
        """Wait for the weights that training begins with.

        Cost: one message of S bytes in; the `shared` state, if there is one.
        """
        with operation(self._ctx, "weights"):
            self._ctx.recv(self._flat.weights_N, source=self._optimizer, tag=WEIGHTS)
        agree(self._ctx, self._shared, source=self._optimizer)

    def send_gradient(self, bucket: Bucket) -> None:
        """Begin to send a bucket of the mean gradient; call for the buckets in their order.

        The bucket's values must not change before the iterator of `weights` has ended.

        Cost: one message of the bucket's bytes.
        """
        self._gradients.send(bucket)

    def weights(self, order: Sequence[Bucket]) -> Iterator[Bucket]:
        """Yield each bucket when its new weights have arrived.

        Args:
            order: All buckets, in the order in which the optimizer updates them.

        Cost: one message in for each bucket, S bytes in all; the `shared` state, if there is one.
        """
        arriving = [
            irecv_bucket(self._ctx, self._flat.weights_N, bucket, source=self._optimizer, tag=WEIGHTS)
            for bucket in order
        ]
        for bucket, message in zip(order, arriving, strict=True):
            message.wait()
            yield bucket
        self._gradients.wait()
        agree(self._ctx, self._shared, source=self._optimizer)


class OptimizerToAggregator:
    """The optimizer's end of the connection: it receives mean gradients from the aggregator and sends new weights.

        link = OptimizerToAggregator(model.parameters(), ctx=ctx, aggregator=rank)
        link.send_first_weights()
        for step in ctx.steps(cfg):
            for bucket in update.step(step, link.gradients()):
                link.send_weights(bucket)
            link.end_step()

    Cost of a step: S bytes each way (float32), in a message for each bucket.
    Order: gradients in the order of the buckets, weights in that of the updates; nothing is added up, so no bit
        changes.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        ctx: Communicator,
        aggregator: Rank,
        shared: SharedState | None = None,
    ) -> None:
        """Plan the messages for these parameters; nothing is sent. A `shared` state goes out with the weights."""
        self._shared = shared
        self._flat = FlatParameters(parameters)
        self._ctx = ctx
        self._aggregator = aggregator
        self._agreed = AgreedBuckets(ctx, self._flat.starts, source=aggregator)
        self._weights = Outbox(ctx, self._flat.weights_N, dests=[aggregator], tag=WEIGHTS)

    def send_first_weights(self) -> None:
        """Send the weights that training begins with.

        Cost: one message of S bytes; the `shared` state, if there is one.
        """
        with operation(self._ctx, "weights"):
            self._ctx.send(self._flat.weights_N, dest=self._aggregator, tag=WEIGHTS)
        agree(self._ctx, self._shared, dests=[self._aggregator])

    def gradients(self) -> Iterator[Bucket]:
        """Yield each bucket when its part of the mean gradient is in `parameter.grad`; call once a step.

        Cost: one message in for each bucket, S bytes in all; in the first steps one of 16 bytes with the buckets' size.
        """
        buckets = self._agreed.begin_step()
        arriving = [
            irecv_bucket(self._ctx, self._flat.grads_N, bucket, source=self._aggregator, tag=GRADIENTS)
            for bucket in buckets
        ]
        for bucket, message in zip(buckets, arriving, strict=True):
            message.wait()
            yield bucket

    def send_weights(self, bucket: Bucket) -> None:
        """Begin to send a bucket's new weights, which must not change before `end_step` has returned.

        Cost: one message of the bucket's bytes.
        """
        self._weights.send(bucket)

    def end_step(self) -> None:
        """Return when all sends of weights are complete.

        Cost: no message except the `shared` state, if there is one.
        """
        agree(self._ctx, self._shared, dests=[self._aggregator])
        self._weights.wait()
