"""Squared norms of gradients, added along one fixed tree over the values of each parameter, however ranks share the values.

A leaf is the squared norm of sixteen consecutive values. The leaves of a parameter form a binary tree like the one over
micro-batches in `comm/reduction.py`. A rank that has a part of a parameter, cut between leaves, computes the largest complete
nodes of its part; the rank that receives the nodes of all parts makes the remaining additions. So a gradient that ranks share
has the same norm, bit for bit, as on one rank.

Shapes: N = values of a flat vector, in which each parameter begins at a leaf and is padded with zeros to whole ones;
L = leaves.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttlaunch.spec.recipe.blocks import aligned_subtrees

LEAF_VALUES = 16
"""The border that `FlatParameters` begins each parameter at."""

_LEAVES_AT_ONCE = 2**13
"""torch makes float64 copies of what it takes the norm of: of the whole vector, it would be twice as large as the gradient."""

_PIECE_LEAVES = 2**16
"""The leaves that are added at once, a power of two. All of them, with the sums of each level, would be 1.25 bytes for each value of the gradient."""

Node = tuple[int, range]
"""The parameter that a sum is of, and the leaves that it is over."""


@dataclass(frozen=True)
class Part:
    """Some values of a parameter, in a flat vector.

    Attributes:
        parameter: The parameter's number, in any numbering.
        first: The index of its first value, a multiple of `LEAF_VALUES`.
        values: Where they are in the vector; begins at a leaf.
    """

    parameter: int
    first: int
    values: range


class SquaredNorms:
    """The sums of squares over some parts of parameters.

    Attributes:
        nodes: What `sums` gives, in order.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Plan the additions.

        Args:
            parts: Parts of a flat vector, in order and without gaps except for the padding.
        """
        self.nodes: list[Node] = []
        self._run = range(parts[0].values.start, _padded(parts[-1].values.stop)) if parts else range(0)
        self._pieces_of: list[int] = []  # by node
        pieces: list[range] = []
        for part in parts:
            first, count = part.first // LEAF_VALUES, -(-len(part.values) // LEAF_VALUES)
            shift = (part.values.start - self._run.start) // LEAF_VALUES - first
            for leaves in aligned_subtrees(range(first, first + count)):
                self.nodes.append((part.parameter, leaves))
                starts = range(leaves.start + shift, leaves.stop + shift, min(len(leaves), _PIECE_LEAVES))
                pieces += (range(start, start + starts.step) for start in starts)
                self._pieces_of.append(len(starts))
        self._batches = [_Batch(batch) for batch in _batches(pieces)]

    def sums(self, grads_N: Tensor) -> list[float]:
        """The sum of squares at each of `nodes`; the vector is only read.

        Cost: one pass over the values, and a few additions for each leaf, on the vector's device; 3 MB, however long the vector is.
        """
        leaves = grads_N[self._run.start : self._run.stop].view(-1, LEAF_VALUES)
        pieces = chain.from_iterable(batch.sums(leaves) for batch in self._batches)
        return [_top_of([*islice(pieces, count)]) for count in self._pieces_of]


class _Batch:
    """Small subtrees, neighbours in a vector, whose leaves are added up together."""

    def __init__(self, pieces: Sequence[range]) -> None:
        """Plan the additions; `pieces` are the leaves of each subtree, in order and without gaps except for the padding."""
        self._leaves = slice(pieces[0].start, pieces[-1].stop)
        self._order = sorted(range(len(pieces)), key=lambda piece: len(pieces[piece]), reverse=True)
        self._ordered = [
            slice(pieces[at].start - self._leaves.start, pieces[at].stop - self._leaves.start) for at in self._order
        ]
        self._of_size = Counter(map(len, pieces))

    def sums(self, leaves: Tensor) -> list[float]:
        """The sum of squares of each subtree; `leaves` has all leaves of the vector, shape `(leaves, LEAF_VALUES)`."""
        own = leaves[self._leaves]
        # Zeros, because they are read also where nothing is computed (`hollow.py`).
        norms_L = torch.zeros(len(own), dtype=torch.float64, device=own.device)
        for norms, values in zip(norms_L.split(_LEAVES_AT_ONCE), own.split(_LEAVES_AT_ONCE), strict=True):
            torch.linalg.vector_norm(values, dim=1, dtype=torch.float64, out=norms)
        norms_L.square_()
        # numpy needs less time for each of the small additions; a GPU's memory stays where it is.
        sums_L: Any
        join: Any
        sums_L, join = (norms_L.numpy(), np.concatenate) if norms_L.is_cpu else (norms_L, torch.cat)
        # The largest subtrees come first. So while each that is left has two sums or more, neighbours belong to one of them, and those
        # that have come down to one sum are the last ones.
        left = join([sums_L[piece] for piece in self._ordered])
        done = []
        size = 1
        while len(left):
            last = len(left) - self._of_size[size]
            done.append(left[last:])
            left = left[0:last:2] + left[1:last:2]
            size *= 2
        by_order = join(done[::-1]).tolist()
        return [total for _, total in sorted(zip(self._order, by_order, strict=True))]


def _batches(pieces: Sequence[range]) -> Iterator[list[range]]:
    """Divide subtrees into runs of at most `_PIECE_LEAVES` leaves each, padding included."""
    batch: list[range] = []
    for piece in pieces:
        if batch and piece.stop - batch[0].start > _PIECE_LEAVES:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _top_of(sums: list[float]) -> float:
    """The sum at the top of a tree, from the sums at as many of its nodes of one level as there are."""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def join_sums(sums: Iterable[tuple[Node, float]]) -> dict[int, float]:
    """The sum of squares of each parameter, from the sums at nodes that together cover it.

    Args:
        sums: Those of a parameter one after the other, in the order of their leaves.
    """
    found = {}
    for parameter, nodes in groupby(sums, key=lambda item: item[0][0]):
        stack: list[tuple[range, float]] = []
        for (_, leaves), value in nodes:
            stack.append((leaves, value))
            while len(stack) > 1 and _are_halves(stack[-2][0], stack[-1][0]):
                _add_top(stack)
        while len(stack) > 1:
            _add_top(stack)
        found[parameter] = stack[0][1]
    return found


def _are_halves(left: range, right: range) -> bool:
    return len(left) == len(right) and left.start % (2 * len(left)) == 0


def _add_top(stack: list[tuple[range, float]]) -> None:
    leaves, right = stack.pop()
    before, left = stack[-1]
    stack[-1] = (range(before.start, leaves.stop), left + right)


def _padded(values: int) -> int:
    return -(-values // LEAF_VALUES) * LEAF_VALUES
