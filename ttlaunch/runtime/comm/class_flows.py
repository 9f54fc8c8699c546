"""Messages between classes of ranks, thousands of which begin and pass at the same time: entered and taken out with operations on arrays.

Each number comes from the same floating-point operations as in `fair_network.py`.

Shapes: C = classes, K = flows that are entered or taken out at once.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from ttlaunch.runtime.comm.flow_table import FlowTable
from ttlaunch.runtime.comm.virtual_clock import Link
from ttlaunch.runtime.comm.virtual_world import Classes

Ints = np.ndarray[Any, np.dtype[np.intp]]


class Between(NamedTuple):
    """Flows between classes; each array has one number of each flow, shape (K,).

    Attributes:
        source, dest: The places of the classes that send and receive.
        sends, receives: What the ends of the messages belong to, by numbers of whoever has entered them.
        size: The bytes of each message.
    """

    source: Ints
    dest: Ints
    sends: Ints
    receives: Ints
    size: Ints

    def of(self, which: Ints | slice) -> "Between":
        return Between(*(one[which] for one in self))


class ClassFlows(FlowTable):
    """Flows between the first ranks of classes; each has the ports of its sender and of its receiver."""

    def __init__(self, classes: Classes, link: Link) -> None:
        """Begin without messages.

        Args:
            classes: The ranks of each class.
            link: What messages cost; ranks do not share links.
        """
        super().__init__((), link.capacity)
        self._sizes = np.array([len(ranks) for ranks in classes])
        self._between = Between(*(np.zeros(len(self._left), dtype=np.intp) for _ in Between._fields))
        for ranks in classes:  # the ports of class c have the numbers 2c + 1 and 2c + 2
            self._number(("out", ranks[0]))
            self._number(("in", ranks[0]))

    def add_all(self, flows: Between, *, now_s: float) -> None:
        """Enter flows that begin now."""
        used, more = len(self._rows), len(flows.size)
        if used + more > len(self._left):
            self._resize(slice(used), size=2 * (used + more))
        rows = slice(used, used + more)
        for known, new in zip(self._between, flows, strict=True):
            known[rows] = new
        is_own = flows.source == flows.dest  # no rank sends to itself
        self._ports[:, rows] = 2 * flows.source + 1, 2 * flows.dest + 2
        self._counts[:, rows] = self._sizes[flows.dest] - is_own, self._sizes[flows.source] - is_own
        self._left[rows], self._rate[rows], self._since_s[rows] = flows.size, 0.0, now_s
        self._passes_s[rows], self._is_alive[rows] = math.inf, True
        self._rows += [None] * more
        self._cross_all(rows, 1)

    def remove_all(self, rows: Ints) -> Between:
        """Take out the flows of some rows, and return them."""
        self._is_alive[rows], self._passes_s[rows] = False, math.inf
        self._cross_all(rows, -1)
        return self._between.of(rows)

    def share_rows(self, now_s: float) -> tuple[float, Ints]:
        """Give all flows their rates, as `FlowTable` does, with new numbers for rows if most of them are empty."""
        alive = np.flatnonzero(self._is_alive[: len(self._rows)])
        if 2 * len(alive) <= len(self._rows):
            self._resize(alive, size=len(self._left))
            self._rows = [None] * len(alive)
        return super().share_rows(now_s)

    def _cross_all(self, rows: Ints | slice, sign: int) -> None:
        """Let the messages of rows pass through their ports, or no longer."""
        weights = sign * self._counts[:, rows].ravel()
        self._crossing += np.bincount(self._ports[:, rows].ravel(), weights=weights, minlength=len(self._crossing))
        self._shares = np.divide(
            self._capacities, self._crossing, out=np.full(len(self._crossing), math.inf), where=self._crossing > 0
        )

    def _resize(self, kept: Ints | slice, *, size: int) -> None:
        """Keep some rows, as the first ones, and have room for so many in all."""
        for name in ("_left", "_rate", "_since_s", "_passes_s", "_is_alive", "_ports", "_counts"):
            setattr(self, name, _resized(getattr(self, name), kept, size))
        self._between = Between(*(_resized(one, kept, size) for one in self._between))
        self._passes_s[~self._is_alive] = math.inf


def _resized(known: Any, kept: Ints | slice, size: int) -> Any:
    """Return an array whose last dimension is as long as `size`, and begins with what was kept of another one."""
    found = known[..., kept]
    made = np.zeros((*found.shape[:-1], size), dtype=known.dtype)
    made[..., : found.shape[-1]] = found
    return made
