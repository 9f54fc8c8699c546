"""All ranks add gradients along the tree, bucket by bucket, while the last backward pass still computes other buckets.

Shapes: N = values of the flat gradient. n = ranks, S = bytes of the gradient, k = the most nodes of the tree that one
rank's block makes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ttlaunch.runtime.comm.protocol import CommunicationError, Communicator, Pending
from ttlaunch.runtime.comm.reduction import (
    GradientTree,
    Subtree,
    aligned_subtrees,
    contiguous_blocks,
    mean_per_token,
)
from ttlaunch.runtime.comm.tree_exchange import Arriving, add_up, begin_receives, next_around
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.bucket_messages import (
    GRADIENTS,
    AgreedBuckets,
    irecv_part,
    isend_part,
    send_bucket_size,
)
from ttlaunch.runtime.parallel.gradients.bucket_tuning import UNMEASURED, BucketTuner, largest_of_several
from ttlaunch.runtime.parallel.gradients.buckets import BYTES_PER_MEGABYTE, Bucket, cut_buckets
from ttlaunch.runtime.parallel.gradients.sums import CountsExchange
from ttlaunch.runtime.parallel.gradients.watch import GradientWatch
from ttlaunch.runtime.world import Rank

_LAG = 1
"""How many buckets may be under way when the next one begins: without any, this rank would wait for slower ranks."""


@dataclass
class _UnderWay:
    """A bucket whose sums are being scattered.

    Attributes:
        arriving: This rank's shard of every node of the tree, in the order of the leaves.
        sends: Shards of this rank's nodes on their way to their owners.
    """

    bucket: Bucket
    shards: list[range]
    arriving: Arriving
    sends: list[Pending]


class GradientExchange:
    """An all-reduce of the mean gradient among ranks; the recipe's loop runs between its calls.

        for step in ctx.steps(cfg):
            model.zero_grad()
            for index, ... in ...:
                exchange.expect(index, tokens=..., loss=...)
                loss.backward()
                exchange.accumulate(index, tokens=..., loss=...)
            loss, tokens = exchange.finish()   # the mean is in the parameters' gradients

    Attributes:
        block: This rank's micro-batches of a step.
        mean_N: The last mean gradient, shape `(N,)`, float32; with `keeps_nodes` a vector of its own, which stays as it is
            until all ranks have begun to exchange those of the next step.
        has_mean: Whether `mean_N` is the whole mean of one step; not while the next one overwrites it.

    Cost of a step: `(k + 1) * (n - 1) / n * S` bytes each way, in `(k + 1) * (n - 1)` messages for each bucket, and one
    message of 16k bytes to each other rank. Buffers for the other ranks' shards of two buckets.
    Order: that of the tree over micro-batches, then one division: the bits of one process for any number of ranks.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        ctx: Communicator,
        among: Sequence[Rank],
        micro_batches: int,
        bucket_megabytes: float | None = None,
        keeps_nodes: bool = False,
    ) -> None:
        """Make the parameters views of one flat vector; nothing is sent.

        Args:
            parameters: The parameters of the local replica, float32; they become views of one flat vector.
            ctx: The communicator of this rank.
            among: The ranks that share a step, in the order of their blocks, which are contiguous.
            micro_batches: M, the micro-batches of a step.
            bucket_megabytes: Size of a bucket; None: the first rank times the first steps and decides, or with `keeps_nodes`
                the size of the gradient does.
            keeps_nodes: Whether this rank's nodes stay as they are until it has the whole mean, so that a step that was
                interrupted can go on among other ranks. Costs S bytes for the mean, and a copy of this rank's shard of its nodes.
        """
        self._flat = FlatParameters(parameters)
        grads_N = self._flat.grads_N
        self.mean_N = torch.zeros_like(grads_N) if keeps_nodes else grads_N
        self.has_mean = False
        self._ctx = ctx
        self._keeps_nodes = keeps_nodes
        self._tree = GradientTree(len(grads_N), device=grads_N.device)
        self._watch = GradientWatch(self._flat)
        if keeps_nodes and bucket_megabytes in (None, UNMEASURED):
            # Where ranks come and go, none of them decides for those that come later.
            bucket_megabytes = largest_of_several(grads_N.nbytes) / BYTES_PER_MEGABYTE
        self._tuner = BucketTuner(grads_N.nbytes, bucket_megabytes=bucket_megabytes)
        self._agreed = AgreedBuckets(ctx, self._flat.starts, source=among[0])
        self._buckets: list[Bucket] = []
        self._is_settled = self._is_open = False
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._nodes: Sequence[Subtree] = ()  # of this rank, in this step
        self._layout: list[list[range]] = []  # of all ranks
        self._scattering: deque[_UnderWay] = deque()
        self._gathering: list[Pending] = []
        self._counts: CountsExchange | None = None
        self._loss, self._tokens = 0.0, 0
        self._error: CommunicationError | None = None
        self.divide(among, contiguous_blocks(micro_batches, len(among)))

    def divide(self, among: Sequence[Rank], blocks: Sequence[range]) -> None:
        """Divide the steps that follow among ranks, each of which has a contiguous block."""
        self._among = among
        self._place = among.index(self._ctx.rank)
        self._others = next_around(self._place, len(among))
        self._layout_of_blocks = [list(aligned_subtrees(block)) for block in blocks]
        self.block = blocks[self._place]

    def mean(self, step: int, enter: Callable[[Iterable[int]], object]) -> tuple[float, int]:
        """Make a step: leave the mean gradient in the parameters' gradients.

        Args:
            step: The step, which is the same on every rank.
            enter: Differentiates the micro-batches with the given indices, with `expect` and `accumulate` for each.

        Returns:
            As `finish`.

        Cost: that of a step; see the class.
        Order: see the class; the order in which `enter` takes its micro-batches is that of their indices.
        """
        del step
        enter(self.block)
        return self.finish()

    def expect(self, index: int, *, tokens: int, loss: float) -> None:
        """Announce the backward pass of a micro-batch; in the pass of the block's last one, buckets are sent.

        Args:
            index: The micro-batch's index; calls go through the block's indices in order.
            tokens: The number of tokens that it predicts.
            loss: The sum of their losses.

        Cost: none, except at the block's last micro-batch: a message of 16k bytes to each other rank, in the first
            steps one of 16 bytes for the size of buckets, and the messages of the buckets during the pass.
        """
        if index == self.block[-1]:
            self._open(index, tokens=tokens, loss=loss)

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients of one micro-batch's *summed* loss; they are zeroed, except the block's last ones.

        Args:
            index, tokens, loss: As for `expect`.

        Cost: none; at the block's last micro-batch that of `expect`, if `expect` was not called for it.
        """
        if self._is_open:
            return  # the backward pass has already entered them, bucket by bucket
        if index == self.block[-1]:
            self._open(index, tokens=tokens, loss=loss)
            return
        self.add(index, tokens=tokens, loss=loss)

    def add(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients of one micro-batch as `accumulate` does, but never send; for `reduce`."""
        self._flat.attach_gradients()
        self._tree.add(index, self._flat.grads_N, tokens=tokens, loss=loss)
        self._flat.grads_N.zero_()

    def finish(self) -> tuple[float, int]:
        """Wait until the mean gradient is in the parameters' gradients.

        Every rank must call, once a step, after the block's last `accumulate`.

        Returns:
            Mean loss per token and number of tokens of the whole step, on every rank.

        Raises:
            ValueError: The block's last micro-batch has not been entered.

        Cost: the remaining messages of the step; see the class.
        """
        if not self._is_open:
            raise ValueError(
                f"the block of rank {self._ctx.rank} ends with micro-batch {self.block[-1]}, which is missing"
            )
        self._watch.end()
        if self._error is not None:
            raise self._error
        while self._scattering:
            self._gather(self._scattering.popleft())
        for message in self._gathering:
            message.wait()
        self._gathering.clear()
        if self._keeps_nodes:
            self._flat.grads_N.copy_(self.mean_N)
        self.has_mean = True
        self._tree.clear()
        self._is_open = False
        self._tuner.end_step()
        return mean_per_token(self._loss, self._tokens), self._tokens

    def reduce(self, nodes: Sequence[Subtree], layout: list[list[range]]) -> tuple[float, int]:
        """Make the mean gradient of nodes that ranks hold in any way, for a step that was interrupted.

        Args:
            nodes: This rank's nodes, in order; they are only read. May be empty.
            layout: The nodes of each rank, by the leaves that they cover; together all ranks hold each leaf once.

        Returns:
            As `finish`.

        Raises:
            ValueError: The exchange does not keep nodes.

        Cost: that of a step, but nothing is sent before all nodes are complete.
        Order: that of the tree, then one division: the bits of one process, whoever holds which nodes.
        """
        if not self._keeps_nodes:
            raise ValueError("only an exchange with `keeps_nodes` can take nodes that it has not added up itself")
        self._begin(nodes, layout)
        for bucket in self._buckets:
            self._scatter(bucket)
        return self.finish()

    def use_mean(self) -> None:
        """Copy `mean_N`, which came from another rank, to the parameters' gradients."""
        self._flat.attach_gradients()
        self._flat.grads_N.copy_(self.mean_N)
        self.has_mean = True

    def interrupt(self) -> list[Subtree]:
        """Give up the step, and hand over this rank's complete nodes, whose memory `give_back` returns.

        Call it when no transfer is under way any more. Gradients are zero afterwards.
        """
        self._watch.stop()
        self._scattering.clear()
        self._gathering.clear()
        self._counts = self._error = None
        self._is_open = False
        nodes = self._tree.take()
        self._flat.attach_gradients()
        self._flat.grads_N.zero_()
        return nodes

    def give_back(self, nodes: Iterable[Subtree]) -> None:
        """Use the memory of nodes again that `interrupt` has handed over."""
        self._tree.give_back(nodes)

    def _open(self, index: int, *, tokens: int, loss: float) -> None:
        self._tree.open_leaf(index, self._flat.grads_N, tokens=tokens, loss=loss)
        self._begin(self._tree.subtrees(), self._layout_of_blocks)
        self._watch.begin(self._buckets, self._complete)

    def _begin(self, nodes: Sequence[Subtree], layout: list[list[range]]) -> None:
        self._nodes, self._layout = nodes, layout
        own = [(node.tokens, node.loss) for node in nodes]
        self._counts = CountsExchange(self._ctx, layout, own, among=self._among)
        self._is_open = True
        self._agree()

    def _agree(self) -> None:
        # One rank decides: times differ between ranks, and buckets that are cut differently would not match.
        if self._keeps_nodes:
            self._buckets = self._buckets or cut_buckets(self._flat.starts, bucket_bytes=self._tuner.bucket_bytes)
        elif self._place:
            self._buckets = self._agreed.begin_step()
        elif not self._is_settled:
            self._is_settled = self._tuner.is_final
            self._buckets = cut_buckets(self._flat.starts, bucket_bytes=self._tuner.bucket_bytes)
            send_bucket_size(self._ctx, torch.tensor([self._tuner.bucket_bytes, self._is_settled]), self._among[1:])

    def _complete(self, bucket: Bucket) -> None:
        self._tree.complete(bucket.values)
        try:
            if self._error is None:
                self._scatter(bucket)
        except CommunicationError as error:
            if not self._keeps_nodes:
                raise
            self._error = error  # the backward pass goes on, so that this micro-batch need not be computed again

    def _scatter(self, bucket: Bucket) -> None:
        """Send every shard of a bucket that is complete on this rank to its owner, and gather the bucket before it."""
        shards = contiguous_blocks(len(bucket.values), len(self._among))
        parts = [bucket.of(node.gradient_N) for node in self._nodes]
        mine = shards[self._place]

        def receive(other: int, leaves: range) -> tuple[Tensor, Pending]:
            buffer = self._buffer(leaves.start, bucket, len(mine))
            return buffer, irecv_part(self._ctx, buffer, bucket, source=self._among[other], tag=GRADIENTS)

        own = [self._own_shard(node, bucket, mine) for node in self._nodes]
        arriving = begin_receives(self._layout, own, place=self._place, receive=receive if mine else None)
        sends = [
            isend_part(self._ctx, _cut(part, shards[other]), bucket, dest=self._among[other], tag=GRADIENTS)
            for other in self._others
            if shards[other]
            for part in parts
        ]
        self._scattering.append(_UnderWay(bucket, shards, arriving, sends))
        if len(self._scattering) > _LAG:
            self._gather(self._scattering.popleft())

    def _own_shard(self, node: Subtree, bucket: Bucket, mine: range) -> Tensor:
        """Return this rank's shard of its own node, into which other nodes may be added."""
        shard = _cut(bucket.of(node.gradient_N), mine)
        return self._buffer(node.start, bucket, len(mine)).copy_(shard) if self._keeps_nodes else shard

    def _buffer(self, node: int, bucket: Bucket, size: int) -> Tensor:
        """Return a buffer for a shard of a node: always the same, so the transport can reuse its requests."""
        # At most `_LAG + 1` buckets are under way, so buckets that use the same buffer never are at the same time.
        key = (node, bucket.index % (_LAG + 1))
        if key not in self._buffers or len(self._buffers[key]) < size:
            self._buffers[key] = self._flat.grads_N.new_empty(size)
        return self._buffers[key][:size]

    def _gather(self, under_way: _UnderWay) -> None:
        """Add up this rank's shard, divide it, and begin to send it to every rank; this does not wait for the other shards."""
        if self._counts is not None:
            self._tokens, self._loss = self._counts.wait()
            self._counts = None
        self.has_mean = False
        bucket, shards = under_way.bucket, under_way.shards
        mean = [_cut(bucket.of(self.mean_N), shard) for shard in shards]
        if shards[self._place]:
            torch.div(add_up(under_way.arriving), max(1, self._tokens), out=mean[self._place])
        for message in under_way.sends:  # the receives below write to the memory that these read
            message.wait()
        for other in self._others:
            if shards[other]:
                source = self._among[other]
                self._gathering.append(irecv_part(self._ctx, mean[other], bucket, source=source, tag=GRADIENTS))
            if shards[self._place]:
                part = mean[self._place]
                self._gathering.append(isend_part(self._ctx, part, bucket, dest=self._among[other], tag=GRADIENTS))


def _cut(part: Tensor, values: range) -> Tensor:
    return part[values.start : values.stop]
