"""Many messages under way at a time, in arrays: the rates of all of them are found with some operations on arrays, whatever their number.

Each number comes from the same floating-point operations as in `fair_network.py`, so both give the same bits.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from ttlaunch.runtime.world import Rank

Port = tuple[str, Rank]
"""What messages share: what leaves a rank (`out`), or enters it (`in`)."""

_LEAST_ROWS = 64


@dataclass(eq=False, slots=True)
class Flow:
    """Messages of one size that begin at the same time and share all ports in the same way.

    Attributes:
        loads: How many of them pass through each port. Of equal ports, one is named.
        left: The bytes of each that had not passed at the time `since_s`, when it got its rate.
        passed: What happens when they have passed.
        passes_s: When that is, if no rate changes before.
    """

    loads: Mapping[Port, int]
    left: float
    passed: Callable[[float], object] = field(repr=False)
    rate: float = 0.0
    since_s: float = 0.0
    passes_s: float = math.inf


class FlowTable:
    """Flows as rows of arrays, in the order in which they began."""

    def __init__(self, flows: Iterable[Flow], capacity: Callable[[Port], float]) -> None:
        """Enter flows, with the rates that they have.

        Args:
            flows: The flows.
            capacity: Returns the bytes per second of a port.
        """
        self._capacity = capacity
        self._number_of: dict[Port, int] = {}
        self._capacities = np.full(1, math.inf)  # no port has number 0: it stands in rows with fewer ports than others
        self._allot(list(flows), room=_LEAST_ROWS)

    def add(self, flow: Flow) -> None:
        """Enter a flow that has just begun."""
        if len(self._rows) == len(self._left) or len(flow.loads) > len(self._ports):
            self._pack(width=len(flow.loads))
        self._enter(flow)

    def remove(self, flow: Flow) -> None:
        """Take out a flow; its numbers here are lost."""
        row = self._row_of.pop(flow)
        self._rows[row] = None
        self._is_alive[row] = False
        self._passes_s[row] = math.inf
        for port, count in flow.loads.items():
            self._cross(self._number_of[port], -count)
        if len(self._row_of) < len(self._rows) // 4 > _LEAST_ROWS:
            self._pack()

    def write_back(self, flows: Iterable[Flow]) -> None:
        """Write what the table knows into flows that are in it."""
        for flow in flows:
            row = self._row_of[flow]
            flow.left, flow.rate = float(self._left[row]), float(self._rate[row])
            flow.since_s, flow.passes_s = float(self._since_s[row]), float(self._passes_s[row])

    def share(self, now_s: float) -> tuple[float, list[Flow]]:
        """Give all flows their rates, as `FairNetwork.share` does."""
        next_s, rows = self.share_rows(now_s)
        return next_s, [flow for row in rows if (flow := self._rows[row]) is not None]

    def share_rows(self, now_s: float) -> "tuple[float, np.ndarray[tuple[int], np.dtype[np.intp]]]":
        """Give all flows their rates, and return when the next ones have passed, and their rows; none without any."""
        used = len(self._rows)
        rates, rate, left = self._rates(), self._rate[:used], self._left[:used]
        since_s, passes_s = self._since_s[:used], self._passes_s[:used]
        rows = np.flatnonzero((rates != rate) & self._is_alive[:used])
        if len(rows):
            left[rows] = np.maximum(0.0, left[rows] - rate[rows] * (now_s - since_s[rows]))
            rate[rows], since_s[rows] = rates[rows], now_s
            passes_s[rows] = now_s + left[rows] / rates[rows]
        next_s = float(passes_s.min(initial=math.inf))
        return next_s, np.flatnonzero((passes_s == next_s) & self._is_alive[:used])

    def _rates(self) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """Return the max-min fair rate of each row, as `fair_rates` finds it."""
        rates, shares, least = np.zeros(len(self._rows)), self._shares, 0.0
        rows = np.flatnonzero(self._is_alive[: len(rates)])
        # One after the other, as they lie in memory: `take` first copies all of an array that does not lie in one piece.
        ports, counts = [one.take(rows) for one in self._ports], [one.take(rows) for one in self._counts]
        free, crossing = self._capacities, self._crossing
        while len(rows):
            least = max(least, float(shares.min()))
            tight = shares <= least
            is_tight = reduce(np.logical_or, [tight.take(one) for one in ports])
            settled, left = np.flatnonzero(is_tight), np.flatnonzero(~is_tight)
            rates[rows.take(settled)] = least
            if len(left):
                charged = sum(
                    np.bincount(port.take(settled), weights=count.take(settled), minlength=len(crossing))
                    for port, count in zip(ports, counts, strict=True)
                )
                free = np.where(charged > 0, np.maximum(0.0, free - least * charged), free)
                crossing = crossing - charged
                shares = np.divide(free, crossing, out=np.full(len(free), math.inf), where=crossing > 0)
            rows = rows.take(left)
            ports, counts = [one.take(left) for one in ports], [one.take(left) for one in counts]
        return rates

    def _pack(self, *, width: int = 0) -> None:
        """Make arrays without the rows of flows that were taken out, with room for as many more, and for flows with so many ports."""
        flows = list(self._row_of)
        self.write_back(flows)
        self._allot(flows, room=len(flows) + _LEAST_ROWS, width=width)

    def _allot(self, flows: list[Flow], *, room: int, width: int = 0) -> None:
        """Make arrays with room for so many more rows, and enter flows."""
        size, width = len(flows) + room, max([2, width, *(len(one.loads) for one in flows)])
        self._left, self._rate, self._since_s = np.zeros(size), np.zeros(size), np.zeros(size)
        self._passes_s, self._is_alive = np.full(size, math.inf), np.zeros(size, dtype=bool)
        self._ports, self._counts = np.zeros((width, size), dtype=np.intp), np.zeros((width, size))
        self._crossing = np.zeros(
            len(self._capacities)
        )  # messages through each port: whole numbers, as floats up to 2^53 are
        self._shares = np.full(len(self._capacities), math.inf)
        self._rows: list[Flow | None] = []
        self._row_of: dict[Flow, int] = {}
        for flow in flows:
            self._enter(flow)

    def _enter(self, flow: Flow) -> None:
        row = self._row_of[flow] = len(self._rows)
        self._rows.append(flow)
        self._left[row], self._rate[row], self._since_s[row] = flow.left, flow.rate, flow.since_s
        self._passes_s[row], self._is_alive[row] = flow.passes_s, True
        for place, (port, count) in enumerate(flow.loads.items()):
            number = self._number(port)
            self._ports[place, row], self._counts[place, row] = number, count
            self._cross(number, count)

    def _number(self, port: Port) -> int:
        """Return the number of a port, which a new one gets."""
        number = self._number_of.get(port)
        if number is None:
            number = self._number_of[port] = len(self._number_of) + 1
            if number == len(self._capacities):
                more = np.full(number, math.inf)
                self._capacities = np.append(self._capacities, more)
                self._crossing, self._shares = (
                    np.append(self._crossing, np.zeros(number)),
                    np.append(self._shares, more),
                )
            self._capacities[number] = self._capacity(port)
        return number

    def _cross(self, number: int, count: int) -> None:
        """Let so many more messages pass through a port."""
        crossing = self._crossing[number] + count
        self._crossing[number] = crossing
        self._shares[number] = self._capacities[number] / crossing if crossing else math.inf
