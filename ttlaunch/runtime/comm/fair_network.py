"""How long messages take that share ports: a fluid model with max-min fair rates.

Every message that is under way has a rate. Rates are max-min fair: none can grow without another one, which is no faster, becoming slower. They
change only when a message begins or has passed. Equal messages between equal ports are one `Flow` with a count for each port, so thousands
of ranks that do the same cost as much as one, with the same floating-point operations.

Few flows are handled one by one, and many in arrays (`flow_table.py`), again with the same operations.

Source: D. Bertsekas, R. Gallager, "Data Networks", 2nd edition, Prentice Hall 1992: the algorithm for max-min fair rates.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable

from ttlaunch.runtime.comm.flow_table import Flow, FlowTable, Port

_MANY = 32
"""So many flows are faster in arrays; fewer than half of them are faster without."""


class FairNetwork:
    """The messages under way."""

    def __init__(self, capacity: Callable[[Port], float]) -> None:
        """Begin without messages.

        Args:
            capacity: Returns the bytes per second of a port.
        """
        self._capacity = capacity
        self._flows: dict[Flow, None] = {}  # in the order in which they began
        self._table: FlowTable | None = None  # of them, while they are many

    def begin(self, flow: Flow, *, now_s: float) -> None:
        """Enter messages; `share` gives them a rate."""
        flow.since_s = now_s
        self._flows[flow] = None
        if self._table is not None:
            self._table.add(flow)
        elif len(self._flows) >= _MANY:
            self._table = FlowTable(self._flows, self._capacity)

    def end(self, flow: Flow) -> None:
        """Take out messages that have passed."""
        del self._flows[flow]
        if self._table is not None:
            self._table.remove(flow)
            if len(self._flows) < _MANY // 2:
                self._table.write_back(self._flows)
                self._table = None

    def share(self, now_s: float) -> tuple[float, list[Flow]]:
        """Give all messages their rates.

        Returns:
            When the next ones have passed if no rate changes before, infinity without any; and these, in the order in which they began.
        """
        if self._table is not None:
            return self._table.share(now_s)
        rates = fair_rates(self._flows, self._capacity)
        for flow, rate in rates.items():
            if rate != flow.rate:
                flow.left = max(0.0, flow.left - flow.rate * (now_s - flow.since_s))
                flow.rate, flow.since_s = rate, now_s
                flow.passes_s = now_s + flow.left / rate
        next_s = min((flow.passes_s for flow in self._flows), default=math.inf)
        return next_s, [flow for flow in self._flows if flow.passes_s == next_s]


def fair_rates(flows: Iterable[Flow], capacity: Callable[[Port], float]) -> dict[Flow, float]:
    """Return the max-min fair rate of each of some flows.

    All ports with the smallest share are settled together, and each is charged once with the product of rate and count: so the result has
    the same bits whether equal messages are one flow or many.

    Cost: for each different rate, one pass through the flows that are left.
    """
    rates: dict[Flow, float] = {}
    crossing: Counter[Port] = Counter()
    for flow in flows:
        for place, count in flow.loads.items():
            crossing[place] += count
    free = {place: capacity(place) for place in crossing}
    open_flows, least = list(flows), 0.0
    while open_flows:
        # Shares only grow from round to round; where rounding says otherwise, a rate of 0 would never end.
        least = max(least, min(free[place] / count for place, count in crossing.items()))
        tight = {place for place, count in crossing.items() if free[place] / count <= least}
        settled: Counter[Port] = Counter()
        still_open = []
        for flow in open_flows:
            if tight.isdisjoint(flow.loads):
                still_open.append(flow)
                continue
            rates[flow] = least
            for place, count in flow.loads.items():
                settled[place] += count
        for place, count in settled.items():
            free[place] = max(0.0, free[place] - least * count)
            crossing[place] -= count
            if not crossing[place]:
                del crossing[place]
        open_flows = still_open
    return rates
