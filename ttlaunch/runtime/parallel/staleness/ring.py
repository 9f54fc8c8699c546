"""The buffers and messages of one step's ring all-reduce, which continues while its worker computes other steps.

Shapes: N = values of the gradient; shard s is part s of `contiguous_blocks(N, W)`. W = workers, S = bytes of the
    gradient.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.comm.reduction import contiguous_blocks
from ttlaunch.runtime.parallel.staleness.protocol import RingPart
from ttlaunch.runtime.telemetry.memory import BUFFERS
from ttlaunch.runtime.telemetry.traffic_counter import operation, register_owner
from ttlaunch.runtime.world import Rank

_GRADIENTS, _COUNTS = 30_200, 30_199
COUNTS = 3
"""How many numbers a worker sends to every other one with its gradient: tokens, summed loss, staleness."""


class RingBuffers:
    """The buffers and messages of one step at one worker, used again for the step K + 1 steps later.

    Cost of a step: `2 * (W - 1)` messages to the next worker, `2 * (W - 1) / W * S` bytes, and one of 24 bytes to every
    other worker. Memory: `2 * S`.
    Order: shard s is summed as workers s, s+1, ..., s-1: the same bits on all workers, and on every run with this W
        from the same gradients.
    Source: P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 69(2),
        2009.

    Attributes:
        sum_N: The sum over all workers, when `advance` has returned True.
        counts: Tokens, summed loss and staleness of each worker in order, shape `(W, COUNTS)`.
    """

    def __init__(self, ctx: Communicator, *, among: Sequence[Rank], like_N: Tensor, tag: int) -> None:
        """Make the buffers; `tag` keeps their messages apart from those of other steps."""
        self._ctx = ctx
        self._among = among
        self._place = among.index(ctx.rank)
        self._tag = _GRADIENTS + tag
        blocks = contiguous_blocks(len(like_N), len(among))
        own_N, self.sum_N = torch.zeros_like(like_N), torch.zeros_like(like_N)
        self._own = [own_N[block.start : block.stop] for block in blocks]
        self._arriving = [self.sum_N[block.start : block.stop] for block in blocks]
        self._own_N = own_N
        self.counts = torch.zeros(len(among), COUNTS, dtype=torch.float64)
        self.part = RingPart(self._place, len(among))
        self._receives: list[Pending] = []
        self._sends: list[Pending] = []
        self._counts: list[Pending] = []
        register_owner(ctx, self, RingBuffers.held_tensors)

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers, which are never freed, for the report of memory; see `telemetry/memory.py`."""
        yield from ((BUFFERS, tensor) for tensor in (self._own_N, self.sum_N))

    def open(self) -> None:
        """Begin to receive for a new step, when the previous step that used these buffers is over.

        Every worker must call before its `give`; no worker waits for another.

        Cost: no message of its own; the receives of a step begin here.
        """
        self.part = RingPart(self._place, len(self._among))
        self._receives = []
        # Only the hops that carry sums: finished shards arrive in the same memory, after `_take` has added the sums.
        self._post_receives(range(len(self._among) - 1))
        with operation(self._ctx, "counts"):
            self._counts = [
                self._ctx.irecv(self.counts[place], source=rank, tag=_COUNTS)
                for place, rank in enumerate(self._among)
                if rank != self._ctx.rank
            ]

    def give(self, grads_N: Tensor, *, tokens: int, loss: float, staleness: int) -> None:
        """Enter this worker's gradient, send its counts to all, and its first shard to the next worker.

        Args:
            grads_N: Shape `(N,)`, float32; copied, so it may change when this returns.
            tokens: The number of tokens of this worker's micro-batches.
            loss: The sum of their losses.
            staleness: Updates between reading the weights and this gradient.

        Cost: 24 bytes (float64) to every other worker, and one shard of `S / W` bytes to the next one; `advance` sends
            the further ones.
        """
        # The ring adds into this copy for several steps, while the worker already computes its next gradient.
        self._own_N.copy_(grads_N)
        self.counts[self._place] = torch.tensor([tokens, loss, staleness], dtype=torch.float64)
        others = [rank for rank in self._among if rank != self._ctx.rank]
        with operation(self._ctx, "counts"):
            self._sends = [self._ctx.isend(self.counts[self._place], dest=rank, tag=_COUNTS) for rank in others]
        self.part = self.part.give()
        if not others:
            self.sum_N.copy_(self._own_N)
        self._send_next()

    def advance(self, *, waits: bool) -> bool:
        """Process the messages that have arrived, or wait for all that are missing, and send the result of each onward.

        Returns:
            Whether the sum and the counts of all workers are complete on this worker.

        Cost: one message of `S / W` bytes to the next worker for each message received, except the last.
        """
        while self.part.may_receive:
            # Messages of one sender and tag keep their order, so the next hop's is the only one that can be used.
            message = self._receives[self.part.received]
            if not (waits or message.test()):
                return False
            message.wait()
            self._take()
        if not self.part.is_whole or not (waits or all(message.test() for message in self._counts)):
            return False
        for message in self._counts:
            message.wait()
        return True

    def close(self) -> None:
        """Wait until no send reads from these buffers any more."""
        for message in self._sends:
            message.wait()
        self._sends = []

    def _take(self) -> None:
        shard = self.part.shard_to_receive(self.part.received)
        if self.part.is_adding:
            self._own[shard].add_(self._arriving[shard])
        self.part = self.part.receive()
        if self.part.received == len(self._among) - 1:  # all sums have arrived: their buffers can take finished shards
            self._arriving[self.part.own_shard].copy_(self._own[self.part.own_shard])
            self._post_receives(range(self.part.received, self.part.hops))
        self._send_next()

    def _send_next(self) -> None:
        """Send the message that the last event has made possible."""
        hop = self.part.sendable - 1
        if hop < 0 or hop < self.part.received:
            return
        shard = self.part.shard_to_send(hop)
        tensor = (self._own if hop < len(self._among) - 1 else self._arriving)[shard]
        if tensor.numel():
            after = self._among[(self._place + 1) % len(self._among)]
            with operation(self._ctx, "gradients"):
                self._sends.append(self._ctx.isend(tensor, dest=after, tag=self._tag))

    def _post_receives(self, hops: range) -> None:
        before = self._among[self._place - 1]
        with operation(self._ctx, "gradients"):
            for hop in hops:
                tensor = self._arriving[self.part.shard_to_receive(hop)]
                message = self._ctx.irecv(tensor, source=before, tag=self._tag) if tensor.numel() else _Nothing()
                self._receives.append(message)


class _Nothing:
    """The transfer of an empty shard: if there are more workers than values, some shards are empty."""

    def wait(self) -> None:
        """Return at once."""

    def test(self) -> bool:
        return True
