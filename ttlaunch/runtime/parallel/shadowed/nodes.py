"""A worker's side of a step: adds gradients up along the tree, sends the sums to their owners, and keeps them until the step is over.

Shapes: N = values of the flat gradient, k = nodes of the tree that this member holds.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import CommunicationError, Communicator, Pending
from ttlaunch.runtime.comm.reduction import GradientTree, Subtree
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.parallel.gradients.bucket_messages import COUNTS, GRADIENTS, isend_part
from ttlaunch.runtime.parallel.gradients.buckets import Bucket
from ttlaunch.runtime.parallel.gradients.watch import GradientWatch
from ttlaunch.runtime.parallel.shadowed.places import Places
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

NUMBERS = 4
"""Numbers of a row of counts: the first row has the step and how many rows follow, the others are about one node each."""


class NodeSender:
    """The sums of one member's micro-batches of a step.

        sender.open(step, places, last=...)
        ...                                 # expect and accumulate for each micro-batch, `end_row` after each row
        sender.send()
        sender.close()                      # the step is over

    Cost of a step: one message of 32(k + 1) bytes to each owner, and each node once, in a message for each bucket. In a usual step
        the buckets travel while the last micro-batch is differentiated.
    Memory: the nodes stay until `close`, so that a step that was interrupted goes on with them.
    """

    def __init__(self, ctx: Communicator, flat: FlatParameters) -> None:
        """Hold nothing; nothing is sent."""
        self._ctx, self._flat = ctx, flat
        self._tree = GradientTree(len(flat.grads_N), device=flat.grads_N.device)
        self._watch = GradientWatch(flat)
        self._kept: list[Subtree] = []  # of a step that was interrupted, or whose leaves are no block
        self._last: int | None = None  # the micro-batch whose backward pass sends
        self._is_open = False
        self._places: Places | None = None
        self._step = 0
        self._owner_of: dict[int, Rank] = {}
        self._sending: list[Pending] = []
        self._counts: Tensor | None = None
        self._error: CommunicationError | None = None

    @property
    def nodes(self) -> Sequence[Subtree]:
        """The complete nodes that this member keeps, in the order of their leaves; those of a row under way are not among them."""
        return self._kept

    def open(self, step: int, places: Places, *, last: int | None) -> None:
        """Begin a step, or go on with one; `last` is the micro-batch whose backward pass sends buckets, None if none does."""
        self._step, self._places, self._last = step, places, last
        self._owner_of = {bucket.index: part.owner for part in places.parts for bucket in part.buckets}

    def expect(self, index: int, *, tokens: int, loss: float) -> None:
        """Announce the backward pass of a micro-batch; that of the last one sends each bucket as soon as it is complete.

        Cost: before the last one, a message of 32(k + 1) bytes to each owner; then k messages for each bucket, S bytes for each node.
        Order: buckets leave in the order in which the backward pass completes them.
        """
        if index != self._last or self._is_open:
            return
        self._tree.open_leaf(index, self._flat.grads_N, tokens=tokens, loss=loss)
        self._is_open = True
        self._send_counts(self._tree.subtrees())
        buckets = [bucket for part in self._of_step.parts for bucket in part.buckets]
        self._watch.begin(buckets, self._complete)

    def accumulate(self, index: int, *, tokens: int, loss: float) -> None:
        """Enter the gradients of one micro-batch's *summed* loss; they are zeroed, except the last ones of a usual step."""
        if self._is_open:
            return  # the backward pass has entered them
        self._flat.attach_gradients()
        self._tree.add(index, self._flat.grads_N, tokens=tokens, loss=loss)
        self._flat.grads_N.zero_()

    def end_row(self) -> None:
        """Keep the nodes of a row of leaves; the next row need not be its neighbour."""
        self._kept = sorted([*self._kept, *self._tree.take()], key=lambda node: node.start)

    def send(self) -> None:
        """Begin to send what no backward pass has sent.

        Raises:
            CommunicationError: A message of the last backward pass could not be sent.

        Cost: as for `expect`, after a change; nothing where the backward pass has sent all.
        Order: parts by owner, buckets as the parts have them, nodes from the first micro-batch on.
        """
        if self._is_open:
            self._watch.end()
        else:
            self.end_row()  # an audited step announces no backward pass
            self._send_counts(self._kept)
            for bucket in chain.from_iterable(part.buckets for part in self._of_step.parts):
                self._send(bucket, self._kept)
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return when the nodes may change."""
        for sending in self._sending:
            sending.wait()
        self._sending.clear()

    def close(self) -> None:
        """Drop the nodes, and leave the gradients zero: the step is over."""
        self._reset()
        self._tree.clear()
        self._tree.give_back(self._kept)
        self._kept = []
        self._flat.attach_gradients()
        self._flat.grads_N.zero_()

    def interrupt(self) -> None:
        """Keep the complete nodes; call it when no transfer is under way any more. Gradients stay what they are."""
        self._watch.stop()
        self.end_row()
        self._reset()

    def keep_only(self, counted: Iterable[range]) -> None:
        """Drop the kept nodes that do not count."""
        counted = list(counted)
        self._tree.give_back(node for node in self._kept if node.leaves not in counted)
        self._kept = [node for node in self._kept if node.leaves in counted]

    @property
    def _of_step(self) -> Places:
        assert self._places is not None  # noqa: S101 - `open` comes first
        return self._places

    def _reset(self) -> None:
        self._sending.clear()
        self._is_open, self._error, self._counts = False, None, None

    def _complete(self, bucket: Bucket) -> None:
        self._tree.complete(bucket.values)
        try:
            if self._error is None:
                self._send(bucket, self._tree.subtrees())
        except CommunicationError as error:
            self._error = error  # the backward pass goes on, so that this micro-batch need not be computed again

    def _send(self, bucket: Bucket, nodes: Sequence[Subtree]) -> None:
        owner = self._owner_of[bucket.index]
        self._sending += [
            isend_part(self._ctx, bucket.of(node.gradient_N), bucket, dest=owner, tag=GRADIENTS) for node in nodes
        ]

    def _send_counts(self, nodes: Sequence[Subtree]) -> None:
        rows = [[node.start, node.size, node.tokens, node.loss] for node in nodes]
        self._counts = torch.tensor([[self._step, len(rows), 0, 0], *rows], dtype=torch.float64)
        with operation(self._ctx, "counts"):
            self._sending += [self._ctx.isend(self._counts, dest=owner, tag=COUNTS) for owner in self._of_step.owners]
