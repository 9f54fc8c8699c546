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

A worker adds the micro-batches of its contiguous block up to the largest complete nodes, and sends these. The rank that
receives the nodes of several workers adds them further up the tree, in the order of their indices. So some rank makes each
addition of the tree exactly once, with the same two operands, and the bits are the same. Floating-point addition commutes, so
only the pairing matters.

Shapes: N = number of values of the flat gradient.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ttlaunch.spec.recipe.blocks import aligned_subtrees, contiguous_blocks

__all__ = ["GradientTree", "Subtree", "aligned_subtrees", "contiguous_blocks", "mean_per_token"]


@dataclass
class Subtree:
    """A node of the tree and the sums over its micro-batches.

    Attributes:
        start: The first micro-batch's index.
        size: The number of micro-batches.
        gradient_N: The sum of their gradients, shape `(N,)`, float32.
    """

    start: int
    size: int
    tokens: int
    loss: float
    gradient_N: Tensor

    @property
    def leaves(self) -> range:
        return range(self.start, self.start + self.size)


class GradientTree:
    """The sums of a step's gradients, tokens and losses, added in the order of the tree.

    Memory: one flat gradient for each subtree that waits for its sibling, at most log2(M) + 1 for a contiguous block
    that starts at 0. Buffers are kept for the next step.

    Attributes:
        num_values: N.
    """

    def __init__(self, num_values: int, *, device: torch.device | str = "cpu") -> None:
        """Create an empty tree for gradients of `num_values` values; the sums are float32."""
        self.num_values = num_values
        self._device = torch.device(device)
        self._stack: list[Subtree] = []
        self._free: list[Tensor] = []
        self._lefts: list[Subtree] = []  # what `complete` adds to the open leaf: its sibling first
        self._open_N: Tensor | None = None
        self._missing = 0  # values of the open leaf that are not complete

    def add(self, index: int, grads_N: Tensor, *, tokens: int, loss: float, leaves: int = 1) -> None:
        """Enter one micro-batch; `grads_N` is only read.

        Args:
            index: The micro-batch's index in the step; calls follow each other without gaps.
            grads_N: Gradient of its *summed* loss, shape `(N,)`, float32, or bfloat16 or float16: the sums are float32.
            tokens: The number of tokens that it predicted.
            loss: The sum of the losses of these tokens.
            leaves: 1; or 2 if `grads_N`, `tokens` and `loss` are sums over this micro-batch and the next. `index` is then even.

        Raises:
            ValueError: The index does not follow the one before, or the two leaves have different parents.
        """
        self._check_follows(index)
        if leaves not in {1, 2} or index % leaves:
            raise ValueError(f"micro-batch {index} and {leaves - 1} more are not a node of the tree")
        if index % 2 and self._stack:
            left = self._stack[-1]  # its sibling: only a leaf ends at an even index
            left.gradient_N.add_(grads_N)
            left.size, left.tokens, left.loss = 2, left.tokens + tokens, left.loss + loss
            self._merge_siblings()
            return
        gradient_N = self._buffer()
        gradient_N.copy_(grads_N)
        self._stack.append(Subtree(index, leaves, tokens, loss, gradient_N))
        self._merge_siblings()

    def subtrees(self) -> Sequence[Subtree]:
        """Return the sums so far: the largest complete nodes, in the order of their indices."""
        return tuple(self._stack)

    def open_leaf(self, index: int, grads_N: Tensor, *, tokens: int, loss: float) -> None:
        """Enter the last micro-batch of a block before its gradient is known: the open leaf, which `complete` adds in parts.

        No copy is made: the additions write into `grads_N`, which belongs to the tree until `clear`.

        Args:
            index: The micro-batch's index, as for `add`.
            grads_N: Where its gradient will be, shape `(N,)`, float32.
            tokens: The number of tokens that it predicts.
            loss: The sum of the losses of these tokens.

        Raises:
            ValueError: The index does not follow the one before.
        """
        self._check_follows(index)
        node = Subtree(index, 1, tokens, loss, grads_N)
        while self._stack and _are_halves(self._stack[-1], node):
            left = self._stack.pop()
            self._lefts.append(left)
            node = Subtree(left.start, 2 * left.size, left.tokens + node.tokens, left.loss + node.loss, grads_N)
        self._stack.append(node)
        self._open_N, self._missing = grads_N, len(grads_N)

    def complete(self, values: range) -> None:
        """Add the sums that wait for the open leaf to its gradient, for those values of the gradient that are now known.

        Args:
            values: A range of the N values; together the calls cover each value exactly once.
        """
        assert self._open_N is not None  # noqa: S101 - `open_leaf` comes first
        sum_N = self._open_N[values.start : values.stop]
        for left in self._lefts:
            sum_N.add_(left.gradient_N[values.start : values.stop])
        self._missing -= len(values)

    def mean(self, out_N: Tensor, *, micro_batches: int) -> tuple[float, int]:
        """Finish the tree, divide once by the number of tokens, and start afresh.

        Args:
            out_N: Gets the gradient of the mean loss, shape `(N,)`, float32.
            micro_batches: M; the tree must hold all of them.

        Returns:
            Mean loss per token, and tokens. If no token counted in any micro-batch, both are 0 and so is the gradient.

        Raises:
            ValueError: Micro-batches are missing.
        """
        held = self._stack[-1].start + self._stack[-1].size if self._stack else 0
        if held != micro_batches or self._stack[0].start:
            raise ValueError(f"the gradient tree holds micro-batches up to {held} of {micro_batches}")
        while len(self._stack) > 1:
            self._add_right_to_left()
        root = self._stack[0]
        torch.div(root.gradient_N, max(1, root.tokens), out=out_N)
        loss, tokens = mean_per_token(root.loss, root.tokens), root.tokens
        self.clear()
        return loss, tokens

    def take(self) -> list[Subtree]:
        """Hand over the complete nodes and start afresh, also in the middle of a step; `give_back` returns their memory.

        An open leaf counts if all of its values are complete: then it is in a node with those that waited for it, which is
        copied. Otherwise it is dropped, and they stay as they were.

        Returns:
            The nodes in the order of their leaves.
        """
        nodes = [node for node in self._stack if node.gradient_N is not self._open_N]
        if self._open_N is not None and not self._missing:
            node = self._stack[-1]
            self._free.extend(left.gradient_N for left in self._lefts)
            buffer_N = self._buffer()
            nodes.append(Subtree(node.start, node.size, node.tokens, node.loss, buffer_N.copy_(self._open_N)))
        else:
            nodes += reversed(self._lefts)
        self._stack.clear()
        self._lefts.clear()
        self._open_N = None
        return nodes

    def give_back(self, nodes: Iterable[Subtree]) -> None:
        """Use the memory of nodes again that `take` has handed over."""
        self._free.extend(node.gradient_N for node in nodes)

    def clear(self) -> None:
        """Drop the sums; keep their memory."""
        self._free.extend(node.gradient_N for node in self._stack if node.gradient_N is not self._open_N)
        self._free.extend(left.gradient_N for left in self._lefts)
        self._stack.clear()
        self._lefts.clear()
        self._open_N = None

    def _check_follows(self, index: int) -> None:
        if self._stack and index != self._stack[-1].start + self._stack[-1].size:
            last = self._stack[-1]
            raise ValueError(f"micro-batch {index} cannot follow {last.start + last.size - 1}; the order is fixed")

    def _merge_siblings(self) -> None:
        """Add the top two subtrees while they are the two halves of a node, as a binary counter carries."""
        while len(self._stack) > 1:
            if not _are_halves(*self._stack[-2:]):
                return
            self._add_right_to_left()

    def _add_right_to_left(self) -> None:
        right = self._stack.pop()
        left = self._stack[-1]
        left.gradient_N.add_(right.gradient_N)
        left.size, left.tokens, left.loss = left.size + right.size, left.tokens + right.tokens, left.loss + right.loss
        if right.gradient_N is not self._open_N:
            self._free.append(right.gradient_N)

    def _buffer(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return torch.zeros(self.num_values, dtype=torch.float32, device=self._device)


def _are_halves(left: Subtree, right: Subtree) -> bool:
    """Return whether two subtrees are the halves of one node."""
    return left.size == right.size and not left.start % (2 * left.size)


def mean_per_token(summed: float, tokens: int) -> float:
    """Divide a sum over tokens by their number; return 0 if there are none."""
    return summed / tokens if tokens else 0.0
