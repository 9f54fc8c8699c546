"""Send the gradients of a layer to the ranks that own them, while the backward pass computes those of the previous layer.

Shapes: N = values of the flat vector of the whole model. n = ranks, S = bytes of the gradient, k = the most nodes of
    the tree over micro-batches that one rank's block makes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.comm.reduction import aligned_subtrees, contiguous_blocks, mean_per_token
from ttlaunch.runtime.comm.tree_exchange import Arriving, add_up, begin_receives, merge_halves, next_around
from ttlaunch.runtime.parallel.gradients.sums import CountsExchange
from ttlaunch.runtime.parallel.zero.layout import Layer
from ttlaunch.runtime.parallel.zero.owned import OwnedParameters
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

_GRADIENTS = 30_032
_LAG = 1
"""How many layers may be under way when the next one begins."""

Counts = Sequence[tuple[int, float]]
"""Tokens and summed loss of each micro-batch of a rank's block."""


@dataclass
class UnderWay:
    """A layer whose sums are being scattered.

    Attributes:
        arriving: This rank's shard of every node of the tree, in the order of the leaves.
        sends: Shards of this rank's nodes on their way to their owners.
        buffers: The buffers that hold these nodes.
    """

    layer: Layer
    arriving: Arriving
    sends: list[Pending]
    buffers: list[Tensor]


class ScatteredGradients:
    """The mean gradient of every layer, added up by the owners of its shards; at stage 0 all ranks then get all of it.

    One layer at a time is differentiated for all of a rank's micro-batches, so partial sums are needed for one or two
    layers and not for the model.

    Cost of a step: `k * (n - 1)` messages each way for each layer, and `k * (n - 1) / n * S` bytes in all; at stage 0,
        `n - 1` messages a layer and `(n - 1) / n * S` bytes more. Buffers for two layers' sums and for arriving shards.
    Order: that of the tree over micro-batches, then one division: the bits of one process for any number of ranks.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owned: OwnedParameters,
        *,
        ctx: Communicator,
        among: Sequence[Rank],
        micro_batches: int,
        blocks: Sequence[range] = (),
    ) -> None:
        """Plan the messages for these parameters; nothing is sent.

        Args:
            parameters: The parameters of the whole model.
            owned: The part of the model that this rank owns, which gets the mean gradient.
            ctx: The communicator of this rank.
            among: The ranks that share a step, in the order of their blocks, which are contiguous.
            micro_batches: M, the micro-batches of a step.
            blocks: Those of each rank; empty: blocks of equal length.
        """
        self._parameters, self._owned, self._ctx, self._among = parameters, owned, ctx, among
        blocks = blocks or contiguous_blocks(micro_batches, len(among))
        self._block = blocks[owned.place]
        self._others = next_around(owned.place, len(among))
        self._nodes = [list(aligned_subtrees(block)) for block in blocks]
        self._room = max(len(layer.values) for layer in owned.layout.layers)
        self._free: list[Tensor] = []
        self._made: dict[int, Tensor] = {}  # by address
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._sums: list[tuple[range, Tensor]] = []
        self._open: Tensor | None = None
        self._parts: dict[tuple[int, int], list[tuple[Rank, Tensor]]] = {}  # by layer and address, as the views
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._shards: dict[tuple[int, int], Tensor] = {}  # by node and layer: parts of these buffers
        self._scattering: deque[UnderWay] = deque()
        self._gathering: list[Pending] = []
        self._counts: CountsExchange | None = None
        self._tokens, self._loss = 0, 0.0
        self._show: Callable[[Sequence[Tensor]], object] | None = None

    @property
    def sums(self) -> list[Tensor]:
        """The sums of the layer that has been differentiated, one for each node of the tree, until `reduce` sends them."""
        return [sum_N for _, sum_N in self._sums]

    @contextmanager
    def shown_to(self, show: Callable[[Sequence[Tensor]], object]) -> Iterator[None]:
        """Show the sums of each layer that is reduced in this block before they are sent."""
        self._show = show
        try:
            yield
        finally:
            self._show = None

    @contextmanager
    def rehearsing(self, block: range) -> Iterator[None]:
        """Add up the gradients of other micro-batches than this rank's in this block; `drop_sums` follows each layer, not `reduce`."""
        own, self._block = self._block, block
        try:
            yield
        finally:
            self._block = own

    def drop_sums(self) -> None:
        """Give up the sums of the layer that has been differentiated."""
        self._give_back(self.sums)
        self._sums = []

    @contextmanager
    def of(self, layer: Layer, index: int) -> Iterator[None]:
        """Enter the gradients of a layer for one micro-batch, which the backward pass in this `with` block computes.

        For two siblings in the tree, the second backward pass itself adds its gradients to the first one's.

        Args:
            layer: The layer; gradients of other layers do not change.
            index: The micro-batch's index; calls go through the block's indices in order.
        """
        buffer = self._open if self._open is not None else self._buffer(layer)
        self._attach(layer, buffer)
        yield
        # The next micro-batch is the other half of this node: its backward pass adds to the same buffer.
        if index % 2 == 0 and index + 1 in self._block:
            self._open = buffer
            return
        first = index if self._open is None else index - 1
        self._open = None
        before = [*self._sums, (range(first, index + 1), buffer)]
        self._sums = merge_halves((leaves, sum_N, None) for leaves, sum_N in before)
        kept = {id(sum_N) for _, sum_N in self._sums}
        self._give_back([sum_N for _, sum_N in before if id(sum_N) not in kept])

    def reduce(self, layer: Layer, counts: Counts) -> None:
        """Send the shards of a layer's sums to their owners, and finish the layer that was reduced before it.

        Every rank must call, for the layers in the same order.

        Args:
            layer: The layer that has been differentiated for the whole block.
            counts: Tokens and loss of the block's micro-batches; used only with the step's first layer.

        Cost: `k * (n - 1)` messages each way, `k * (n - 1) / n` of the layer's bytes (float32); with the step's first
            layer also one message of 16k bytes to each other rank.
        """
        # Nothing is under way: this is the step's first layer. The counts travel once, with it.
        if self._counts is None and not self._scattering:
            self._counts = self._exchange(counts)
        sums, self._sums = self.sums, []
        if self._show is not None:
            self._show(sums)
        mine = layer.shards[self._owned.place]
        parts = [sum_N[layer.within(mine)] for sum_N in sums]
        with operation(self._ctx, "gradients", bucket=layer.index):
            # Receives before sends, so that no shard of another rank has to wait inside MPI for a buffer.
            arriving = self._receive(layer, parts)
            parts_of_nodes = [self._parts_of_others(layer, sum_N) for sum_N in sums]
            sends = [
                self._ctx.isend(part, dest=dest, tag=_GRADIENTS)
                for of_nodes in zip(*parts_of_nodes, strict=True)
                for dest, part in of_nodes
            ]
        self._scattering.append(UnderWay(layer, arriving, sends, sums))
        if len(self._scattering) > _LAG:
            self._finish(self._scattering.popleft())

    def finish(self) -> tuple[float, int]:
        """Wait until this rank's shards of the mean gradient are complete; return mean loss per token and tokens.

        Every rank must call, once a step, after the last `reduce`.

        Cost: at stage 0, `n - 1` messages each way for each layer, with `(n - 1) / n` of its bytes; else no message of its
            own.
        """
        while self._scattering:
            self._finish(self._scattering.popleft())
        for message in self._gathering:
            message.wait()
        self._gathering.clear()
        self._owned.add_head_gradient()
        return mean_per_token(self._loss, self._tokens), self._tokens

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the buffers for partial sums and for arriving shards."""
        return sum(one.untyped_storage().nbytes() for one in [*self._made.values(), *self._buffers.values()])

    def _exchange(self, counts: Counts) -> CountsExchange:
        rows = [torch.tensor(one, dtype=torch.float64) for one in counts]
        leaves = (range(index, index + 1) for index in self._block)
        own = merge_halves((leaf, row, None) for leaf, row in zip(leaves, rows, strict=True))
        return CountsExchange(
            self._ctx, self._nodes, [(int(row[0].item()), row[1].item()) for _, row in own], among=self._among
        )

    def _receive(self, layer: Layer, parts: Sequence[Tensor]) -> Arriving:
        size = len(layer.shards[self._owned.place])

        def receive(other: int, leaves: range) -> tuple[Tensor, Pending]:
            buffer = self._shard_buffer(leaves.start, layer, size)
            return buffer, self._ctx.irecv(buffer, source=self._among[other], tag=_GRADIENTS)

        return begin_receives(self._nodes, parts, place=self._owned.place, receive=receive if size else None)

    def _finish(self, under_way: UnderWay) -> None:
        """Add up this rank's shard, divide it, and at stage 0 send it to every rank."""
        if self._counts is not None:
            self._tokens, self._loss = self._counts.wait()
            self._counts = None
        layer, mine = under_way.layer, self._owned.gradients(under_way.layer)
        if mine.numel():
            torch.div(add_up(under_way.arriving), max(1, self._tokens), out=mine)
        for message in under_way.sends:  # their buffers are used again, or receive other ranks' shards below
            message.wait()
        self._give_back(under_way.buffers)
        if self._owned.shares_state:
            return
        with operation(self._ctx, "gradients", bucket=layer.index):
            for other in self._others:
                shard = layer.shards[other]
                if shard:
                    part = self._owned.grads_N[shard.start : shard.stop]
                    self._gathering.append(self._ctx.irecv(part, source=self._among[other], tag=_GRADIENTS))
                if mine.numel():
                    self._gathering.append(self._ctx.isend(mine, dest=self._among[other], tag=_GRADIENTS))

    def _attach(self, layer: Layer, buffer: Tensor) -> None:
        key = (layer.index, buffer.data_ptr())
        if key not in self._views:
            self._views[key] = [
                buffer[layer.within(one.part.values)].view(one.shape)
                for one in self._owned.layout.fragments(layer.values)
            ]
        for place, view in zip(layer.parameters, self._views[key], strict=True):
            self._parameters[place].grad = view

    def _buffer(self, layer: Layer) -> Tensor:
        """Return zeros for the gradients of a layer: their part of the flat gradient if that is free, else a buffer."""
        if not self._owned.shares_gradients and not self._sums:
            return self._owned.grads_N[layer.values.start : layer.values.stop].zero_()
        if not self._free:
            made = self._owned.grads_N.new_empty(self._room)
            self._made[made.data_ptr()] = made
            self._free.append(made)
        return self._free.pop()[: len(layer.values)].zero_()

    def _give_back(self, buffers: Sequence[Tensor]) -> None:
        self._free += [self._made[one.data_ptr()] for one in buffers if one.data_ptr() in self._made]

    def _parts_of_others(self, layer: Layer, sum_N: Tensor) -> list[tuple[Rank, Tensor]]:
        """Return the shards of a buffer that others own, and who: always the same, since there are few buffers."""
        key = (layer.index, sum_N.data_ptr())
        if key not in self._parts:
            self._parts[key] = [
                (self._among[other], sum_N[layer.within(layer.shards[other])])
                for other in self._others
                if layer.shards[other]
            ]
        return self._parts[key]

    def _shard_buffer(self, node: int, layer: Layer, size: int) -> Tensor:
        """Return a buffer for a shard of another rank's node: always the same, so the transport can reuse its requests."""
        # At most `_LAG + 1` layers are under way, so layers that use the same buffer never are at the same time.
        key = (node, layer.index % (_LAG + 1))
        whole = self._buffers.get(key)
        if whole is None:
            most = max(len(one.shards[self._owned.place]) for one in self._owned.layout.layers)
            whole = self._buffers[key] = self._owned.grads_N.new_empty(most)
        part = self._shards.get((node, layer.index))
        if part is None:
            part = self._shards[node, layer.index] = whole[:size]
        return part
