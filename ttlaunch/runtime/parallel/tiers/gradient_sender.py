"""Adds a worker's gradients up along the tree, and sends them bucket by bucket while the last ones are still computed.

Shapes: N = values of the flat gradient, K = nodes of the tree that a block of micro-batches makes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.comm.reduction import GradientTree, aligned_subtrees
from ttlaunch.runtime.comm.tree_exchange import Arriving, merge_halves
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.bucket_messages import COUNTS, GRADIENTS, irecv_bucket, isend_part
from ttlaunch.runtime.parallel.gradients.buckets import Bucket
from ttlaunch.runtime.parallel.gradients.watch import GradientWatch
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank


def counts_of(tree: GradientTree) -> Tensor:
    """Return start, length, tokens and summed loss of each node of the tree, shape (K, 4), float64."""
    rows = [[node.start, node.size, node.tokens, node.loss] for node in tree.subtrees()]
    return torch.tensor(rows, dtype=torch.float64)


class GradientSender:
    """Adds up the gradients of this rank's block of micro-batches and those of its members, and sends the sums to `dest`.

    A member is a rank whose `dest` is this rank.

        sender.add(index, ...)               # for each micro-batch but the last
        sender.open(index, buckets, ...)     # before the last backward pass, in which buckets are sent
        sender.close()

    Cost of a step: for each node of the tree that the joint block makes, the gradient once, as one message for each
        bucket; one message of 32 bytes a node. Each member sends the same for its nodes, into a buffer of N values a
        node.
    Order: that of the tree over micro-batches: the same bits with and without members.
    """

    def __init__(
        self, ctx: Communicator, flat: FlatParameters, *, dest: Rank, block: range, members: Mapping[Rank, range]
    ) -> None:
        """Plan the messages; nothing is sent.

        Args:
            ctx: The communicator of this rank.
            flat: The flat vectors that hold the gradients.
            dest: The rank that gets the sums.
            block: This rank's block of micro-batches.
            members: The blocks of its members, in order; the first follows this rank's own block.
        """
        self._ctx = ctx
        self._flat = flat
        self._dest = dest
        self._block = block
        self._tree = GradientTree(len(flat.grads_N), device=flat.grads_N.device)
        self._watch = GradientWatch(flat)
        self._members = [(rank, leaves) for rank, its in members.items() for leaves in aligned_subtrees(its)]
        self._buffers = [torch.empty_like(flat.grads_N) for _ in self._members]
        self._arriving: dict[int, list[Pending]] = {}
        self._counts: list[tuple[Tensor, Pending]] = []
        self._late: list[Bucket] = []
        self._sending: list[Pending] = []

    def add(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients of a micro-batch other than the last."""
        self._flat.attach_gradients()
        self._tree.add(index, self._flat.grads_N, tokens=tokens, loss=loss)

    def open(self, index: int, buckets: Sequence[Bucket], *, tokens: int, loss: float) -> None:
        """Enter the last micro-batch of the block; the backward pass that follows computes its gradients, or has already.

        Args:
            index: The micro-batch's index.
            buckets: The buckets of the step, equal on all ranks.
            tokens: The number of tokens that the micro-batch predicts.
            loss: The sum of their losses.

        Cost: one message of 32K bytes (float64); then one of each bucket's bytes (float32) for each node, as buckets
            are complete.
        """
        self._tree.open_leaf(index, self._flat.grads_N, tokens=tokens, loss=loss)
        if self._members:
            self._begin_receives(buckets)
        else:
            self._send_counts(counts_of(self._tree))
        self._watch.begin(buckets, self._complete)

    def close(self) -> None:
        """Send the remaining buckets, and return when the gradients may be overwritten.

        Cost: with members, the messages of the last bucket; else no message of its own.
        """
        self._watch.end()
        for bucket in self._late:
            self._send(bucket)
        self._late.clear()
        # The sends read the tree's sums, so the tree is cleared last.
        for sending in self._sending:
            sending.wait()
        self._sending.clear()
        self._tree.clear()

    def _complete(self, bucket: Bucket) -> None:
        """Send a bucket that is complete on this rank; with members the bucket before it, since theirs may arrive later."""
        self._tree.complete(bucket.values)
        if self._members:
            self._late.append(bucket)
            if len(self._late) > 1:
                self._send(self._late.pop(0))
        else:
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        # With members, counts can be sent only when the members' have arrived; without, `open` has sent them already.
        if self._counts:
            self._send_counts(self._joint_counts())
        own: Arriving = [(node.leaves, bucket.of(node.gradient_N), None) for node in self._tree.subtrees()]
        theirs = self._arriving.pop(bucket.index, [])
        for (_, leaves), box_N, message in zip(self._members, self._buffers, theirs, strict=True):
            own.append((leaves, bucket.of(box_N), message))
        for _, sum_N in merge_halves(own):
            self._sending.append(isend_part(self._ctx, sum_N, bucket, dest=self._dest, tag=GRADIENTS))

    def _begin_receives(self, buckets: Sequence[Bucket]) -> None:
        for rank in dict.fromkeys(rank for rank, _ in self._members):
            rows = sum(member == rank for member, _ in self._members)
            buffer = torch.empty(rows, 4, dtype=torch.float64)
            with operation(self._ctx, "counts"):
                self._counts.append((buffer, self._ctx.irecv(buffer, source=rank, tag=COUNTS)))
        # All receives begin at once, because each node of a member has a buffer for the whole vector.
        for bucket in buckets:
            self._arriving[bucket.index] = [
                irecv_bucket(self._ctx, box_N, bucket, source=rank, tag=GRADIENTS)
                for (rank, _), box_N in zip(self._members, self._buffers, strict=True)
            ]

    def _joint_counts(self) -> Tensor:
        """Return the counts of the nodes that this rank's block and its members' blocks make together."""
        for _, message in self._counts:
            message.wait()
        rows = torch.cat([counts_of(self._tree), *(buffer for buffer, _ in self._counts)])
        self._counts.clear()
        leaves = [node.leaves for node in self._tree.subtrees()] + [leaves for _, leaves in self._members]
        merged = merge_halves((node, row, None) for node, row in zip(leaves, rows[:, 2:], strict=True))
        return torch.tensor([[node.start, len(node), *row.tolist()] for node, row in merged], dtype=torch.float64)

    def _send_counts(self, counts: Tensor) -> None:
        with operation(self._ctx, "counts"):
            self._sending.append(self._ctx.isend(counts, dest=self._dest, tag=COUNTS))
