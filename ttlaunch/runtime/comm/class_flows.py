"""Messages between classes of ranks, thousands of which begin and pass at the same time: entered and taken out with operations on arrays.

Each number comes from the same floating-point operations as in `fair_network.py`.

Shapes: C = classes, K = flows that are entered at once.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ttlaunch.runtime.comm.flow_table import FlowTable
from ttlaunch.runtime.comm.virtual_clock import Link
from ttlaunch.runtime.world import Rank

Ints = np.ndarray[tuple[int], np.dtype[np.intp]]


class ClassFlows(FlowTable):
    """Flows between the first ranks of classes; each has the ports of its sender and of its receiver."""

    def __init__(self, first: Sequence[Rank], link: Link) -> None:
        """Begin without messages.

        Args:
            first: The first rank of each class.
            link: What messages cost; ranks do not share links.
        """
        super().__init__((), link.capacity)
        for rank in first:  # the ports of class c have the numbers 2c + 1 and 2c + 2
            self._number(("out", rank))
            self._number(("in", rank))

    def add_all(
        self, ends: Sequence[tuple[int, int]], counts: Sequence[tuple[int, int]], sizes: Sequence[int], *, now_s: float
    ) -> range:
        """Enter flows that have just begun, and return their rows.

        Args:
            ends: The places of the classes that send and receive, shape (K, 2).
            counts: How many messages leave each sender and reach each receiver, shape (K, 2).
            sizes: The bytes of each message.
            now_s: When they begin.
        """
        used, more = len(self._rows), len(sizes)
        if used + more > len(self._left):
            self._grow(used + 2 * more)
        rows = slice(used, used + more)
        ports = 2 * np.array(ends, dtype=np.intp) + np.array([1, 2])
        self._ports[rows], self._counts[rows] = ports, counts
        self._left[rows], self._rate[rows], self._since_s[rows] = sizes, 0.0, now_s
        self._passes_s[rows], self._is_alive[rows] = math.inf, True
        self._rows += [None] * more
        self._cross_all(ports, np.array(counts, dtype=float))
        return range(used, used + more)

    def remove_all(self, rows: Ints) -> None:
        """Take out flows."""
        self._is_alive[rows], self._passes_s[rows] = False, math.inf
        self._cross_all(self._ports[rows], -self._counts[rows])
        if not self._is_alive[: len(self._rows)].any():
            self._rows = []  # between two exchanges nothing is under way, so rows begin anew

    def _cross_all(self, ports: Any, counts: Any) -> None:
        self._crossing += np.bincount(ports.ravel(), weights=counts.ravel(), minlength=len(self._crossing))
        self._shares = np.divide(
            self._capacities, self._crossing, out=np.full(len(self._crossing), math.inf), where=self._crossing > 0
        )

    def _grow(self, size: int) -> None:
        """Make room for so many rows in all."""
        for name in ("_left", "_rate", "_since_s", "_passes_s", "_is_alive", "_ports", "_counts"):
            known = getattr(self, name)
            grown = np.zeros((size, *known.shape[1:]), dtype=known.dtype)
            grown[: len(known)] = known
            setattr(self, name, grown)
        self._passes_s[len(self._rows) :] = math.inf
