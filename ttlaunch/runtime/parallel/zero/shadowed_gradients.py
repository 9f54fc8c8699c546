"""The mean gradients of a member's own slot and of the one that it shadows, among members that come and go.

    all members -- their sums of slot i --> owner of slot i -- the mean --> shadow of slot i

The owner adds up and divides as in any other run, and sends what it has made to the shadow, which therefore has the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.parallel.zero.gradients import ScatteredGradients, UnderWay
from ttlaunch.runtime.parallel.zero.layout import Layer
from ttlaunch.runtime.parallel.zero.owned import OwnedParameters
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

_SHADOWS = 30_034


@dataclass(frozen=True)
class Shadow:
    """How a member takes part in keeping every slot twice.

    Attributes:
        owned: The slot that it shadows.
        source: The owner of this slot.
        dest: The member that shadows its own slot.
    """

    owned: OwnedParameters
    source: Rank
    dest: Rank


class ShadowedGradients(ScatteredGradients):
    """`ScatteredGradients` of one epoch that also sends each mean to its shadow.

    Cost: that of `ScatteredGradients`, and for each layer one message each way with the bytes of a shard. They travel while the
        backward pass computes the layers before, except those of the first layer.
    Order: as there; a shadow has the bits of the owner.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owned: OwnedParameters,
        *,
        ctx: Communicator,
        blocks: Sequence[range],
        shadow: Shadow | None,
        each: Callable[[Sequence[int]], Iterator[int]],
    ) -> None:
        """Plan the messages of an epoch; nothing is sent.

        Args:
            parameters: The parameters of the whole model.
            owned: The slot that this member owns.
            ctx: The communicator of this rank.
            blocks: The micro-batches of each member.
            shadow: Who shadows what; None in an epoch with one member.
            each: Goes through micro-batches, measures each, and raises when the members change.
        """
        among = [Rank(place) for place in range(len(blocks))]
        super().__init__(parameters, owned, ctx=ctx, among=among, micro_batches=blocks[-1].stop, blocks=blocks)
        self._shadow, self._each, self._ctx_of_shadow = shadow, each, ctx

    @contextmanager
    def of(self, layer: Layer, index: int) -> Iterator[None]:
        """Enter the gradients of a layer for one micro-batch; see `ScatteredGradients`.

        Raises:
            EpochOverError: The members change.
        """
        for _ in self._each([index]):
            with super().of(layer, index):
                yield

    def finish(self) -> tuple[float, int]:
        """Wait until the means of both slots are complete; see `ScatteredGradients`."""
        found = super().finish()
        if self._shadow is not None:
            self._shadow.owned.add_head_gradient()
        return found

    def _finish(self, under_way: UnderWay) -> None:
        super()._finish(under_way)
        if self._shadow is None:
            return
        layer, ctx = under_way.layer, self._ctx_of_shadow
        mine, other = self._owned.gradients(layer), self._shadow.owned.gradients(layer)
        with operation(ctx, "shadows", bucket=layer.index):
            if other.numel():
                self._gathering.append(ctx.irecv(other, source=self._shadow.source, tag=_SHADOWS))
            if mine.numel():
                self._gathering.append(ctx.isend(mine, dest=self._shadow.dest, tag=_SHADOWS))
