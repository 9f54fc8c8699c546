"""A keeper's side of a step: the owner of a part adds up what the workers send and divides; the other keeper gets the mean.

Shapes: N = values of the flat gradient.
"""

from collections import deque
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import CommunicationError, Communicator, Pending
from ttlaunch.runtime.comm.reduction import mean_per_token
from ttlaunch.runtime.comm.tree_exchange import Arriving, add_up
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.bucket_messages import COUNTS, GRADIENTS, irecv_part, isend_part
from ttlaunch.runtime.parallel.gradients.buckets import Bucket
from ttlaunch.runtime.parallel.shadowed.nodes import NUMBERS
from ttlaunch.runtime.parallel.shadowed.places import Places
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

_READY, _TOTAL = 30_040, 30_041
_WINDOW = 2
"""Buckets whose messages may arrive at the same time: while one is added up, the next is on its way."""
_MOST_TOKENS = 2**53
"""A float holds every smaller number of tokens exactly."""


class MeanMaker:
    """Leaves the whole mean gradient of a step at both keepers, before either of them uses it.

        loss, tokens = maker.make(step, places, layout)   # this keeper has the mean
        maker.confirm(step, places)                       # so has the other one

    Cost of a step: an owner gets its part of each node from the workers, and sends its part of the mean, a message for each bucket, to
        the other keeper, with 24 bytes if that one owns nothing; both send each other 8 bytes. Buffers for two buckets of each node.
    Order: that of the tree over micro-batches, then one division: the bits of one process.
    """

    def __init__(self, ctx: Communicator, flat: FlatParameters) -> None:
        """Plan nothing yet."""
        self._ctx, self._flat = ctx, flat
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def make(self, step: int, places: Places, layout: Sequence[Sequence[range]]) -> tuple[float, int]:
        """Make the mean of a step together with the other keeper, in the parameters' gradients.

        Args:
            step: The step.
            places: The members.
            layout: For each place, the nodes that its member sends.

        Returns:
            Mean loss per token and number of tokens of the whole step.

        Raises:
            CommunicationError: A member sends something else than its sums of this step.

        Cost: receives each node once, S bytes or this owner's part of them, and the other owner's part of the mean; sends its own.
        Order: that of the tree over micro-batches, bucket by bucket; the mean leaves as soon as a bucket is added up.
        """
        self._flat.attach_gradients()
        arriving = [
            irecv_part(self._ctx, bucket.of(self._flat.grads_N), bucket, source=part.owner, tag=GRADIENTS)
            for part in places.parts
            if part.owner != places.rank
            for bucket in part.buckets
        ]
        if places.rank in places.owners:
            loss, tokens = self._receive_counts(step, places, layout)
            sending = self._add_up(places, layout, loss=loss, tokens=tokens)
        else:
            loss, tokens = self._receive_total(step, places)
            sending = []
        for message in chain(arriving, sending):
            message.wait()
        return mean_per_token(loss, tokens), tokens

    def _add_up(self, places: Places, layout: Sequence[Sequence[range]], *, loss: float, tokens: int) -> list[Pending]:
        """Make the mean of this member's parts, and begin to send it to the other keeper."""
        others = [rank for rank in places.keepers if rank != places.rank]
        total = torch.tensor([loss, tokens], dtype=torch.float64)
        with operation(self._ctx, "counts"):
            sending = [self._ctx.isend(total, dest=other, tag=_TOTAL) for other in others if other not in places.owners]
        nodes = sorted(
            ((leaves, Rank(rank)) for rank, its in enumerate(layout) for leaves in its), key=lambda one: one[0].start
        )
        buckets = [bucket for part in places.parts if part.owner == places.rank for bucket in part.buckets]
        waiting = deque(self._begin_receives(bucket, nodes) for bucket in buckets[:_WINDOW])
        for at, bucket in enumerate(buckets):
            mean = bucket.of(self._flat.grads_N)
            torch.div(add_up(waiting.popleft()), max(1, tokens), out=mean)
            if at + _WINDOW < len(buckets):
                waiting.append(self._begin_receives(buckets[at + _WINDOW], nodes))
            sending += [isend_part(self._ctx, mean, bucket, dest=other, tag=GRADIENTS) for other in others]
        return sending

    def _begin_receives(self, bucket: Bucket, nodes: Sequence[tuple[range, Rank]]) -> Arriving:
        found: Arriving = []
        for at, (leaves, source) in enumerate(nodes):
            buffer = self._buffer(at, bucket)
            message = irecv_part(self._ctx, buffer, bucket, source=source, tag=GRADIENTS)
            found.append((leaves, buffer, message))
        return found

    def _buffer(self, node: int, bucket: Bucket) -> Tensor:
        """Return a buffer for a bucket of a node: always the same, so the transport can reuse its requests."""
        key, size = (node, bucket.index % _WINDOW), len(bucket.values)
        if key not in self._buffers or len(self._buffers[key]) < size:
            self._buffers[key] = self._flat.grads_N.new_empty(size)
        return self._buffers[key][:size]

    def _receive_counts(self, step: int, places: Places, layout: Sequence[Sequence[range]]) -> tuple[float, int]:
        """Return summed loss and tokens of the step, added along the tree."""
        rows: list[tuple[range, Tensor]] = []
        with operation(self._ctx, "counts"):
            found = [
                (rank, torch.empty(1 + len(layout[rank]), NUMBERS, dtype=torch.float64)) for rank in places.workers
            ]
            messages = [self._ctx.irecv(buffer, source=rank, tag=COUNTS) for rank, buffer in found]
            for (rank, buffer), message in zip(found, messages, strict=True):
                message.wait()
                rows += zip(layout[rank], _checked(buffer, step, layout[rank], rank=rank), strict=True)
        rows.sort(key=lambda one: one[0].start)
        loss_and_tokens = add_up((leaves, row, None) for leaves, row in rows)
        tokens, loss = loss_and_tokens.tolist()
        return loss, int(tokens)

    def _receive_total(self, step: int, places: Places) -> tuple[float, int]:
        total = torch.empty(2, dtype=torch.float64)
        with operation(self._ctx, "counts"):
            self._ctx.recv(total, source=places.owners[0], tag=_TOTAL)
        loss, tokens = total.tolist()
        if not 0 <= tokens < _MOST_TOKENS:
            raise CommunicationError(f"rank {places.owners[0]} says that step {step} had {tokens:g} tokens")
        return loss, int(tokens)

    def confirm(self, step: int, places: Places) -> None:
        """Wait until the other keeper has the whole mean, too: an update that only one of them could make would be lost with it.

        Raises:
            CommunicationError: It speaks of another step.

        Cost: one message of 8 bytes each way.
        Order: it returns on one keeper only after the other has called it for the same step.
        """
        others = [rank for rank in places.keepers if rank != places.rank]
        own, theirs = torch.tensor([step]), [torch.empty(1, dtype=torch.int64) for _ in others]
        with operation(self._ctx, "counts"):
            sending = [self._ctx.isend(own, dest=rank, tag=_READY) for rank in others]
            messages = [
                self._ctx.irecv(buffer, source=rank, tag=_READY) for rank, buffer in zip(others, theirs, strict=True)
            ]
            for message in chain(messages, sending):
                message.wait()
        for rank, buffer in zip(others, theirs, strict=True):
            if buffer.item() != step:
                raise CommunicationError(f"rank {rank} is ready for step {buffer.item()}, expected {step}")


def _checked(rows: Tensor, step: int, nodes: Sequence[range], *, rank: Rank) -> Tensor:
    """Return tokens and summed loss of each node that a worker sends, shape (k, 2)."""
    about, sent = rows[0].tolist(), [(int(start), int(size)) for start, size in rows[1:, :2].tolist()]
    if about[:2] != [step, len(nodes)] or sent != [(leaves.start, len(leaves)) for leaves in nodes]:
        expected = ", ".join(map(str, nodes)) or "nothing"
        raise CommunicationError(f"rank {rank} brings {sent} of step {about[0]:g}, expected {expected} of step {step}")
    if not bool(((rows[1:, 2] >= 0) & (rows[1:, 2] < _MOST_TOKENS)).all()):
        raise CommunicationError(
            f"rank {rank} says that its micro-batches of step {step} had {rows[1:, 2].tolist()} tokens"
        )
    return rows[1:, 2:]
