"""The messages of an exchange in buckets: their tags, how ranks agree on the buckets, and slices being sent.

Shapes: N = values of the flat vectors.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.parallel.gradients.buckets import Bucket, cut_buckets
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

BUCKET_SIZE, COUNTS, GRADIENTS, WEIGHTS = 30_010, 30_011, 30_012, 30_013
"""Tags. Messages of one tag between two ranks arrive in the order of the buckets, forwards or backwards."""

_OPERATIONS = {GRADIENTS: "gradients", WEIGHTS: "weights"}


def irecv_bucket(ctx: Communicator, vector_N: Tensor, bucket: Bucket, *, source: Rank, tag: int) -> Pending:
    """Begin to receive a bucket into its part of a flat vector.

    Args:
        ctx: This rank.
        vector_N: Shape `(N,)`, float32, contiguous; the bucket's part changes until the result has been waited for.
        bucket: The bucket; `source` sends the same one with `isend_part` or an `Outbox`.
        source: The sender.
        tag: `GRADIENTS` or `WEIGHTS`; the operation's name follows from it.

    Cost: one message of 4 bytes a value.
    Order: buckets of one tag match in the order in which both ends begin them.
    """
    return irecv_part(ctx, bucket.of(vector_N), bucket, source=source, tag=tag)


def irecv_part(ctx: Communicator, part: Tensor, bucket: Bucket, *, source: Rank, tag: int) -> Pending:
    """Begin to receive a bucket's values as `irecv_bucket` does, but into a tensor of their own.

    Cost: one message of 4 bytes a value.
    Order: buckets of one tag match in the order in which both ends begin them.
    """
    with operation(ctx, _OPERATIONS[tag], bucket=bucket.index):
        return ctx.irecv(part, source=source, tag=tag)


def isend_part(ctx: Communicator, part: Tensor, bucket: Bucket, *, dest: Rank, tag: int) -> Pending:
    """Begin to send a bucket's values, wherever they are.

    Args:
        ctx: This rank.
        part: The values, float32, contiguous; they must not change before the result has been waited for.
        bucket: The bucket; `dest` receives the same one.
        dest: The receiver.
        tag: `GRADIENTS` or `WEIGHTS`; the operation's name follows from it.

    Cost: one message of 4 bytes a value.
    Order: buckets of one tag match in the order in which both ends begin them.
    """
    with operation(ctx, _OPERATIONS[tag], bucket=bucket.index):
        return ctx.isend(part, dest=dest, tag=tag)


class Outbox:
    """Sends buckets of a flat vector to some ranks, and keeps the sends that are under way.

    Order: the receivers must begin to receive the buckets in the order of the calls of `send`.
    """

    def __init__(self, ctx: Communicator, vector_N: Tensor, *, dests: Sequence[Rank], tag: int) -> None:
        self._ctx = ctx
        self._vector_N = vector_N
        self._dests = dests
        self._tag = tag
        self._sending: list[Pending] = []

    def send(self, bucket: Bucket) -> None:
        """Begin to send; the bucket's values must not change before `wait()` has returned.

        Cost: one message of 4 bytes a value to each of `dests`.
        """
        part = bucket.of(self._vector_N)
        self._sending += [isend_part(self._ctx, part, bucket, dest=dest, tag=self._tag) for dest in self._dests]

    def wait(self) -> None:
        """Wait for all sends; the buckets may then be overwritten."""
        for sending in self._sending:
            sending.wait()
        self._sending.clear()


class AgreedBuckets:
    """The buckets of a step. One rank decides their size, and sends it before each step until it is final.

    Attributes:
        buckets: The buckets in the order of backward passes.
    """

    def __init__(
        self, ctx: Communicator, starts: Sequence[int], *, source: Rank, followers: Iterable[Rank] = ()
    ) -> None:
        """Prepare the agreement; nothing is sent.

        Args:
            ctx: This rank.
            starts: Where each parameter begins, as in `cut_buckets`.
            source: The rank that decides.
            followers: The ranks that this one passes the decision on to.
        """
        self.buckets: list[Bucket] = []
        self._ctx = ctx
        self._starts = starts
        self._source = source
        self._followers = tuple(followers)
        self._is_final = False

    def begin_step(self) -> list[Bucket]:
        """Return the buckets of the step that begins; call once for each step.

        Raises:
            CommunicationError: `source` sent something else than a size.

        Cost: one message of 16 bytes from `source`, and one to each follower; none once the size is final.
        Order: before the step's first bucket; nothing is added up.
        """
        if not self._is_final:
            decision = torch.empty(2, dtype=torch.int64)
            with operation(self._ctx, "bucket_size"):
                self._ctx.recv(decision, source=self._source, tag=BUCKET_SIZE)
                send_bucket_size(self._ctx, decision, self._followers)
            size, is_final = decision.tolist()
            self._is_final = bool(is_final)
            self.buckets = cut_buckets(self._starts, bucket_bytes=size)
        return self.buckets


def send_bucket_size(ctx: Communicator, decision: Tensor, followers: Iterable[Rank]) -> None:
    """Send the size of a bucket, and whether it is final.

    Args:
        ctx: This rank.
        decision: The bytes of a bucket, and 1 if they are final, else 0; shape (2,), int64.
        followers: The ranks that receive it in `AgreedBuckets.begin_step`.

    Cost: one message of 16 bytes to each of `followers`.
    Order: before the step's first bucket; nothing is added up.
    """
    with operation(ctx, "bucket_size"):
        for sending in [ctx.isend(decision, dest=rank, tag=BUCKET_SIZE) for rank in followers]:
            sending.wait()
