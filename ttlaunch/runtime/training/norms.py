"""Squared norms of gradients, added along one fixed tree over the values of each parameter, however ranks share the values.

A leaf is the squared norm of sixteen consecutive values. The leaves of a parameter form a binary tree like the one over
micro-batches in `comm/reduction.py`. A rank that has a part of a parameter, cut between leaves, computes the largest complete
nodes of its part; the rank that receives the nodes of all parts makes the remaining additions. So a gradient that ranks share
has the same norm, bit for bit, as on one rank.

Shapes: N = values of a flat vector, in which each parameter begins at a leaf and is padded with zeros to whole ones;
L = leaves.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttlaunch.spec.recipe.blocks import aligned_subtrees

LEAF_VALUES = 16
"""The border that `FlatParameters` begins each parameter at."""

_LEAVES_AT_ONCE = 8_192
"""torch makes float64 copies of what it takes the norm of: of the whole vector, it would be twice as large as the gradient."""

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
        leaves_of: list[range] = []
        for part in parts:
            first, count = part.first // LEAF_VALUES, -(-len(part.values) // LEAF_VALUES)
            shift = (part.values.start - self._run.start) // LEAF_VALUES - first
            for leaves in aligned_subtrees(range(first, first + count)):
                self.nodes.append((part.parameter, leaves))
                leaves_of.append(range(leaves.start + shift, leaves.stop + shift))
        self._order = sorted(range(len(leaves_of)), key=lambda node: len(leaves_of[node]), reverse=True)
        self._leaves = [leaves_of[node] for node in self._order]
        self._of_size = Counter(map(len, leaves_of))

    def sums(self, grads_N: Tensor) -> list[float]:
        """The sum of squares at each of `nodes`; the vector is only read.

        Cost: one pass over the values, and a few additions for each leaf, on the vector's device.
        """
        if not self.nodes:
            return []
        leaves = grads_N[self._run.start : self._run.stop].view(-1, LEAF_VALUES)
        # Zeros, because they are read also where nothing is computed (`hollow.py`).
        norms_L = torch.zeros(len(leaves), dtype=torch.float64, device=leaves.device)
        for norms, values in zip(norms_L.split(_LEAVES_AT_ONCE), leaves.split(_LEAVES_AT_ONCE), strict=True):
            torch.linalg.vector_norm(values, dim=1, dtype=torch.float64, out=norms)
        norms_L.square_()
        # numpy needs less time for each of the small additions; a GPU's memory stays where it is.
        sums_L: Any
        join: Any
        sums_L, join = (norms_L.numpy(), np.concatenate) if norms_L.is_cpu else (norms_L, torch.cat)
        # The largest nodes come first. So while every node left has two sums or more, neighbours belong to one node, and nodes that
        # have come down to one sum are the last ones.
        left = join([sums_L[some.start : some.stop] for some in self._leaves])
        done = []
        size = 1
        while len(left):
            last = len(left) - self._of_size[size]
            done.append(left[last:])
            left = left[0:last:2] + left[1:last:2]
            size *= 2
        by_order = join(done[::-1]).tolist()
        return [total for _, total in sorted(zip(self._order, by_order, strict=True))]


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
