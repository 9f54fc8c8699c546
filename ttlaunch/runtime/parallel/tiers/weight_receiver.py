"""Receives new weights at a worker, whose next forward pass begins as soon as the weights of the first layers have arrived.

Shapes: N = values of the flat weights.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from torch import nn

from ttlaunch.runtime.comm.agreement import SharedState, agree
from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.bucket_messages import WEIGHTS, Outbox, irecv_bucket
from ttlaunch.runtime.parallel.gradients.buckets import Bucket
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank


class WeightReceiver:
    """Receives weights in the order in which a forward pass reads them, the last bucket of a backward pass first.

    A rank with members sends each bucket on to them when it has arrived.

    Cost of a step: S bytes in (float32), in a message for each bucket, and as much to each member.
    Order: the last bucket first; nothing is added up, so no bit changes.
    """

    def __init__(
        self,
        ctx: Communicator,
        flat: FlatParameters,
        *,
        source: Rank,
        members: Iterable[Rank] = (),
        shared: SharedState | None = None,
    ) -> None:
        self._ctx = ctx
        self._flat = flat
        self._source = source
        self._members = tuple(members)
        self._shared = shared
        self._arriving: deque[tuple[Bucket, Pending]] = deque()
        self._to_members = Outbox(ctx, flat.weights_N, dests=self._members, tag=WEIGHTS)

    def receive_first(self) -> None:
        """Wait for the weights that training begins with.

        Cost: one message of S bytes in (float32), and one to each member; the `shared` state, if there is one.
        """
        with operation(self._ctx, "weights"):
            self._ctx.recv(self._flat.weights_N, source=self._source, tag=WEIGHTS)
            for sending in [self._ctx.isend(self._flat.weights_N, dest=rank, tag=WEIGHTS) for rank in self._members]:
                sending.wait()
        agree(self._ctx, self._shared, source=self._source, dests=self._members)

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Begin to receive a step's weights, which may change at any moment until `wait` or `wait_for` has returned.

        Args:
            buckets: The buckets of the step, in the order of the backward pass.

        Cost: a message for each bucket, S bytes in all; the `shared` state, if there is one.
        """
        for bucket in reversed(buckets):
            message = irecv_bucket(self._ctx, self._flat.weights_N, bucket, source=self._source, tag=WEIGHTS)
            self._arriving.append((bucket, message))
        if self._members:
            self.wait()  # members compute too, and must not wait until this rank reaches a layer
        agree(self._ctx, self._shared, source=self._source, dests=self._members)

    def wait(self) -> None:
        """Return when all weights have arrived.

        Cost: to each member the buckets that have arrived since the last wait.
        """
        self.wait_for(len(self._flat.parameters))

    def wait_for(self, parameter: int) -> None:
        """Return when this parameter, by its place, and all before it have arrived.

        Cost: to each member the buckets that have arrived since the last wait.
        """
        while self._arriving and self._arriving[0][0].parameters.start <= parameter:
            bucket, message = self._arriving.popleft()
            message.wait()
            self._to_members.send(bucket)
        if not self._arriving:
            self._to_members.wait()

    def hold_back(self, model: nn.Module) -> None:
        """Let each part of a model wait for all its parameters before its forward pass.

        Parts are the model's children, with a container replaced by its children.
        """
        places = {id(parameter): place for place, parameter in enumerate(self._flat.parameters)}
        held = [(model, model.parameters(recurse=False)), *((part, part.parameters()) for part in _parts(model))]
        for module, parameters in held:
            own = [places[id(parameter)] for parameter in parameters if id(parameter) in places]
            if own:
                module.register_forward_pre_hook(partial(self._before, max(own)))

    def _before(self, parameter: int, *_: object) -> None:
        if self._arriving:
            self.wait_for(parameter)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from _parts(child)
        else:
            yield child
