"""The time of a world in one process: what each rank's own clock shows, and what happens next.

No real time passes. A rank's clock advances by what it computes, and when it has to wait, to the moment at which its wait ends. The
world takes the next event only when no rank can continue, so whatever a rank still does happens at that event or later, and events
are processed in the order of their times.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ttlaunch.runtime.comm.flow_table import Port
from ttlaunch.runtime.comm.routes import Routes
from ttlaunch.runtime.world import Rank


@dataclass(frozen=True)
class Link:
    """What a message of any two ranks costs.

    Attributes:
        latency_s: The time that its first byte travels.
        bytes_per_s: What each rank can send, and receive, in a second; messages at the same time share it.
        slowness: How many times slower the ports of some ranks are.
        routes: The links that ranks share; None: each rank has its port, and nothing else counts.
    """

    latency_s: float
    bytes_per_s: float
    slowness: Mapping[Rank, float] = field(default_factory=dict)
    routes: Routes | None = None

    def port(self, rank: Rank) -> float:
        """Return the bytes that a rank can send, and receive, in a second."""
        return self.bytes_per_s / self.slowness.get(rank, 1.0)

    def ports(self, source: Rank, dest: Rank) -> tuple[Port, ...]:
        """Return what a message shares with others that are under way."""
        found = None if self.routes is None else self.routes.ports(source, dest)
        return found or (("out", source), ("in", dest))

    def capacity(self, port: Port) -> float:
        """Return the bytes per second of a port or a link."""
        found = None if self.routes is None else self.routes.capacity(port)
        return self.port(port[1]) if found is None else found

    def latency_between(self, source: Rank, dest: Rank) -> float:
        """Return how long the first byte of a message travels."""
        found = None if self.routes is None else self.routes.latency_s(source, dest)
        return self.latency_s if found is None else found


@dataclass
class Spent:
    """How a rank has spent its time.

    Attributes:
        computing_s: It has computed.
        exposed_s: It has waited while a message from or to it was under way, or has carried one.
        waiting_s: It has waited for other ranks to begin a message.
    """

    computing_s: float = 0.0
    exposed_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def all_s(self) -> float:
        return self.computing_s + self.exposed_s + self.waiting_s

    def since(self, before: "Spent") -> "Spent":
        """Return what was spent since an earlier reading."""
        return Spent(
            self.computing_s - before.computing_s, self.exposed_s - before.exposed_s, self.waiting_s - before.waiting_s
        )


@dataclass
class _Own:
    """What one rank's clock knows.

    Attributes:
        under_way: How many groups of messages from or to the rank are under way.
        busy: When some were, from and to; the last one may not have ended.
        idle_s: Since when the rank has only waited, and this is not yet in `spent`; None: it has not.
    """

    now_s: float = 0.0
    idle_s: float | None = None
    spent: Spent = field(default_factory=Spent)
    under_way: int = 0
    busy: list[list[float]] = field(default_factory=list)


class VirtualClock:
    """The clocks of all ranks, and what happens next."""

    def __init__(self, ranks: Iterable[Rank], *, slowness: Mapping[Rank, float] | None = None) -> None:
        """Begin at 0 on every rank.

        Args:
            ranks: The ranks that have a clock.
            slowness: How many times as long some ranks take to compute.
        """
        self._slowness = dict(slowness or {})
        self._jitter: dict[Rank, float] = {}
        self._own = {rank: _Own() for rank in ranks}
        self._events: list[tuple[float, bool, int, Callable[[float], object]]] = []
        self._count = 0

    def now_s(self, rank: Rank) -> float:
        """Return what the clock of a rank shows."""
        return self._own[rank].now_s

    def spent(self, rank: Rank) -> Spent:
        """Return how a rank has spent its time up to now."""
        self._settle(self._own[rank])
        known = self._own[rank].spent
        return Spent(known.computing_s, known.exposed_s, known.waiting_s)

    def set_jitter(self, rank: Rank, factor: float) -> None:
        """Let all that a rank computes from now on take so many times as long."""
        self._jitter[rank] = factor

    def compute(self, rank: Rank, seconds: float) -> None:
        """Let a rank compute what takes so long on a rank that is not slow."""
        self.compute_each(rank, (seconds,))

    def compute_each(self, rank: Rank, each_s: Sequence[float]) -> None:
        """Let a rank compute several things, one after the other, as `compute` does."""
        slowness, jitter = self._slowness.get(rank, 1.0), self._jitter.get(rank, 1.0)
        own = self._own[rank]
        self._settle(own)
        now_s, computing_s = own.now_s, own.spent.computing_s
        for seconds in each_s:
            took = seconds * slowness * jitter
            now_s += took
            computing_s += took
        own.now_s, own.spent.computing_s = now_s, computing_s

    def carry(self, rank: Rank, seconds: float) -> None:
        """Let a rank itself carry a message for so long, during which it can do nothing else."""
        own = self._own[rank]
        self._settle(own)
        own.now_s += seconds
        own.spent.exposed_s += seconds

    def at(self, when_s: float, happens: Callable[[float], object], *, is_last: bool = False) -> None:
        """Let something happen at a time.

        Of several things at the same time, what was entered first is first, but those that are `is_last` follow all others.
        """
        self._count += 1
        heapq.heappush(self._events, (when_s, is_last, self._count, happens))

    def advance(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._events:
            return False
        when_s, _, _, happens = heapq.heappop(self._events)
        happens(when_s)
        return True

    def begin_message(self, rank: Rank, at_s: float, *, count: int = 1) -> None:
        """Note that messages from or to a rank are under way from now on, so many groups of them."""
        own = self._own[rank]
        own.under_way += count
        if own.under_way > count:
            return
        if own.busy and own.busy[-1][1] == at_s:
            own.busy[-1][1] = float("inf")
        else:
            own.busy.append([at_s, float("inf")])

    def end_message(self, rank: Rank, at_s: float, *, count: int = 1) -> None:
        """Note that so many groups of messages are no longer under way."""
        own = self._own[rank]
        own.under_way -= count
        if not own.under_way:
            own.busy[-1][1] = at_s

    def resume(self, rank: Rank, at_s: float) -> None:
        """Let a rank that has waited continue at a time.

        Waits without anything between them count as one stretch: so what they add up to does not depend on the order in which the rank waits for
        several messages, and ranks that wait for the same ones in another order have spent the same, to the bit.
        """
        own = self._own[rank]
        if own.idle_s is None:
            own.idle_s = own.now_s
        own.now_s = max(own.now_s, at_s)

    def _settle(self, own: _Own) -> None:
        """Divide the time in which a rank has only waited: by whether messages from or to it were under way."""
        if own.idle_s is None:
            return
        began_s, ended_s, own.idle_s = own.idle_s, own.now_s, None
        exposed_s = 0.0
        for start_s, end_s in own.busy:
            exposed_s += max(0.0, min(end_s, ended_s) - max(start_s, began_s))
        own.busy = [one for one in own.busy if one[1] >= ended_s]  # the rank never waits in its past again
        own.spent.exposed_s += exposed_s
        own.spent.waiting_s += max(0.0, ended_s - began_s - exposed_s)
