r"""The one order in which gradients are added, so that the sum has the same bits on any number of ranks.

Micro-batches 0..M-1 are the leaves of a binary tree; a node covers 2^l of them and starts at a multiple of 2^l. For
M = 6:

            0-5
          /     \
        0-3      4-5
       /   \    /   \
     0-1   2-3  4    5
     / \   / \
    0   1 2   3

A worker adds its contiguous block as far as whole nodes go and sends those; whoever has several workers' nodes goes on
in the order of the indices. Every addition of the tree is made exactly once, by somebody, with the same two operands,
hence the same bits. Floating-point addition commutes, so only the pairing matters.

Shapes: N = values of the flat gradient, H = values of the header that travels in front of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ttlaunch.runtime.sockets import Socket
from ttlaunch.runtime.world import Rank

HEADER_VALUES = 16
"""H: start, size, tokens and summed loss as float64, and room, so that the gradient begins on a 64-byte border."""


def contiguous_blocks(count: int, parts: int) -> list[range]:
    """Cut `range(count)` into `parts` contiguous blocks; where it does not divide, the first ones are one longer.

    >>> contiguous_blocks(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    short, longer = divmod(count, parts)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + short + (part < longer))
    return [range(start, end) for start, end in pairwise(ends)]


def aligned_subtrees(block: range) -> Iterator[range]:
    """The largest nodes of the tree that lie in a block, in order: one if the block is a node itself.

    >>> list(aligned_subtrees(range(3, 8)))
    [range(3, 4), range(4, 8)]
    """
    start = block.start
    while start < block.stop:
        size = start & -start or 1 << (block.stop - start).bit_length()
        while start + size > block.stop:
            size //= 2
        yield range(start, start + size)
        start += size


@dataclass
class Subtree:
    """A node of the tree and the sums over its micro-batches.

    Attributes:
        message_N: Shape `(H + N,)`, float32: header and summed gradient, in one buffer so that one message moves both.
    """

    start: int
    size: int
    tokens: int
    loss: float
    message_N: Tensor

    @property
    def gradient_N(self) -> Tensor:
        return self.message_N[HEADER_VALUES:]


class GradientTree:
    """The sums of a step's gradients, tokens and losses, added in the order of the tree.

    Memory: one flat gradient for each subtree that waits for its sibling, at most log2(M) + 1 for a contiguous block
    that starts at 0. Buffers are kept for the next step.

    Attributes:
        num_values: N.
    """

    def __init__(self, num_values: int, *, device: torch.device | str = "cpu") -> None:
        """A tree over gradients of `num_values` float32 values."""
        self.num_values = num_values
        self._device = torch.device(device)
        self._stack: list[Subtree] = []
        self._free: list[Tensor] = []

    def add(self, index: int, grads_N: Tensor, *, tokens: int, loss: float) -> None:
        """Enter one micro-batch; `grads_N` is only read.

        Args:
            index: Of the micro-batch in the step; one after the other, without gaps.
            grads_N: Gradient of its *summed* loss, shape `(N,)`, float32, or bfloat16 or float16: the sums are float32.
            tokens: That it predicted.
            loss: Summed over them.

        Raises:
            ValueError: The index does not follow the one before.
        """
        self._check_follows(index)
        if index % 2 and self._stack and self._stack[-1].size == 1:
            left = self._stack[-1]
            left.gradient_N.add_(grads_N)
            left.size, left.tokens, left.loss = 2, left.tokens + tokens, left.loss + loss
            self._merge_siblings()
            return
        message_N = self._buffer()
        message_N[HEADER_VALUES:].copy_(grads_N)
        self._stack.append(Subtree(index, 1, tokens, loss, message_N))

    def subtrees(self) -> Sequence[Subtree]:
        """The sums so far, as the largest whole nodes, in the order of the indices."""
        return tuple(self._stack)

    def send(self, socket: Socket, *, dest: Rank) -> None:
        """Send all sums to the rank that goes on with them, and start afresh.

        Cost: one message of `4 * (H + N)` bytes for each of `subtrees()`: one if the block is a node of the tree.
        """
        for subtree in self._stack:
            header = torch.tensor([subtree.start, subtree.size, subtree.tokens, subtree.loss], dtype=torch.float64)
            subtree.message_N[: 2 * len(header)].view(torch.float64).copy_(header)
            socket.send(subtree.message_N, dest=dest)
        self.clear()

    def receive(self, socket: Socket, *, source: Rank, block: range) -> None:
        """Go on with the sums that `source` has sent for its block of micro-batches.

        Must be called for all senders in the order of their blocks.

        Raises:
            ValueError: A sum does not follow what the tree already holds.
            SocketError: The sender's gradient has another size.
        """
        for expected in aligned_subtrees(block):
            message_N = self._buffer()
            socket.recv(message_N, source=source)
            start, size, tokens, loss = message_N[:8].view(torch.float64).tolist()
            if range(int(start), int(start + size)) != expected:
                raise ValueError(
                    f"rank {source} sent the sum of {size:.0f} micro-batches from {start:.0f}, not {expected}"
                )
            self._check_follows(expected.start)
            self._stack.append(Subtree(expected.start, len(expected), int(tokens), loss, message_N))
            self._merge_siblings()

    def mean(self, out_N: Tensor, *, micro_batches: int) -> tuple[float, int]:
        """Finish the tree, divide once by the number of tokens, and start afresh.

        Args:
            out_N: Gets the gradient of the mean loss, shape `(N,)`, float32.
            micro_batches: M, which the tree must hold, all of them.

        Returns:
            Mean loss per token, and tokens.

        Raises:
            ValueError: Micro-batches are missing.
        """
        held = self._stack[-1].start + self._stack[-1].size if self._stack else 0
        if held != micro_batches or self._stack[0].start:
            raise ValueError(f"the gradient tree holds micro-batches up to {held} of {micro_batches}")
        while len(self._stack) > 1:
            self._add_right_to_left()
        root = self._stack[0]
        torch.div(root.gradient_N, root.tokens, out=out_N)
        loss, tokens = root.loss / root.tokens, root.tokens
        self.clear()
        return loss, tokens

    def clear(self) -> None:
        """Drop the sums; keep their memory."""
        self._free.extend(subtree.message_N for subtree in self._stack)
        self._stack.clear()

    def _check_follows(self, index: int) -> None:
        if self._stack and index != self._stack[-1].start + self._stack[-1].size:
            last = self._stack[-1]
            raise ValueError(f"micro-batch {index} cannot follow {last.start + last.size - 1}; the order is fixed")

    def _merge_siblings(self) -> None:
        """Add the top two subtrees while they are the two halves of a node, as a binary counter carries."""
        while len(self._stack) > 1:
            left, right = self._stack[-2:]
            if left.size != right.size or left.start % (2 * left.size):
                return
            self._add_right_to_left()

    def _add_right_to_left(self) -> None:
        right = self._stack.pop()
        left = self._stack[-1]
        left.gradient_N.add_(right.gradient_N)
        left.size, left.tokens, left.loss = left.size + right.size, left.tokens + right.tokens, left.loss + right.loss
        self._free.append(right.message_N)

    def _buffer(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return torch.zeros(HEADER_VALUES + self.num_values, dtype=torch.float32, device=self._device)
