"""The time of a world in one process: what each rank's own clock shows, and when its messages leave and arrive.

No real time passes. A rank's clock advances by what it computes, and when it has to wait, to the moment at which its wait ends. The
world takes the next event only when no rank can continue, so whatever a rank still does happens at that event or later, and events
are processed in the order of their times.

Every rank has one port out of it and one into it. A message begins when both its send and its receive have begun, waits for its turn
in the sender's port, travels, waits for its turn in the receiver's port, and is there when its last byte has passed. Both ports pass
messages in the order in which they come. So a server to which many ranks send at once receives one message after the other.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ttlaunch.runtime.world import Rank


@dataclass(frozen=True)
class Link:
    """What a message of any two ranks costs.

    Attributes:
        latency_s: The time that its first byte travels.
        bytes_per_s: What each rank can send, and receive, in a second.
    """

    latency_s: float
    bytes_per_s: float


@dataclass
class Spent:
    """How a rank has spent its time.

    Attributes:
        computing_s: It has computed.
        exposed_s: It has waited for a message that was under way, or in the queue of a port.
        waiting_s: It has waited for a message that its other end had not begun.
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


class VirtualClock:
    """The clocks of all ranks, and what happens next.

    Attributes:
        step_bytes: The bytes that each pair of ranks has sent within steps.
    """

    def __init__(self, num_ranks: int, link: Link, *, slowness: Mapping[Rank, float] | None = None) -> None:
        """Begin at 0 on every rank.

        Args:
            num_ranks: The size of the world.
            link: What messages cost.
            slowness: How many times as long some ranks take to compute.
        """
        self._link = link
        self._slowness = dict(slowness or {})
        self._now_s = [0.0] * num_ranks
        self._spent = [Spent() for _ in range(num_ranks)]
        self._in_step = [False] * num_ranks
        self._out_free_s, self._in_free_s = [0.0] * num_ranks, [0.0] * num_ranks
        self._events: list[tuple[float, int, Callable[[float], object]]] = []
        self._count = 0
        self.step_bytes: Counter[tuple[Rank, Rank]] = Counter()

    def now_s(self, rank: Rank) -> float:
        """Return what the clock of a rank shows."""
        return self._now_s[rank]

    def spent(self, rank: Rank) -> Spent:
        """Return how a rank has spent its time up to now."""
        known = self._spent[rank]
        return Spent(known.computing_s, known.exposed_s, known.waiting_s)

    def enter_step(self, rank: Rank, *, is_step: bool) -> None:
        """Note whether what a rank sends from now on belongs to a step."""
        self._in_step[rank] = is_step

    def compute(self, rank: Rank, seconds: float) -> None:
        """Let a rank compute what takes so long on a rank that is not slow."""
        took = seconds * self._slowness.get(rank, 1.0)
        self._now_s[rank] += took
        self._spent[rank].computing_s += took

    def sent(self, source: Rank, dest: Rank, size: int) -> None:
        """Count the bytes of a message that a rank begins to send."""
        if self._in_step[source]:
            self.step_bytes[source, dest] += size

    def carry(
        self,
        edge: tuple[Rank, Rank],
        size: int,
        *,
        begins_s: float,
        left: Callable[[float], object],
        arrived: Callable[[float], object],
    ) -> None:
        """Carry a message from port to port.

        Args:
            edge: Its source and destination.
            size: Its bytes.
            begins_s: When both ends have begun.
            left, arrived: Called with the time at which its last byte has left the source, and has arrived.
        """
        source, dest = edge
        passing_s = size / self._link.bytes_per_s

        def leave(at_s: float) -> None:
            first_s = max(at_s, self._out_free_s[source])
            self._out_free_s[source] = first_s + passing_s
            self.at(first_s + passing_s, left)
            self.at(first_s + self._link.latency_s, arrive)

        def arrive(at_s: float) -> None:
            first_s = max(at_s, self._in_free_s[dest])
            self._in_free_s[dest] = first_s + passing_s
            self.at(first_s + passing_s, arrived)

        self.at(begins_s, leave)

    def at(self, when_s: float, happens: Callable[[float], object]) -> None:
        """Let something happen at a time; of several at the same time, what was entered first is first."""
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, happens))

    def advance(self) -> float | None:
        """Let the next event happen and return its time; None if there is none."""
        if not self._events:
            return None
        when_s, _, happens = heapq.heappop(self._events)
        happens(when_s)
        return when_s

    def resume(self, rank: Rank, *, at_s: float, began_s: float | None) -> None:
        """Let a rank that has waited continue.

        Args:
            rank: The rank.
            at_s: When its wait has ended.
            began_s: When the message that it waited for began; None if the wait ended without one.
        """
        before_s = self._now_s[rank]
        waited_s = max(0.0, at_s - before_s)
        idle_s = waited_s if began_s is None else min(max(0.0, began_s - before_s), waited_s)
        self._now_s[rank] = before_s + waited_s
        self._spent[rank].waiting_s += idle_s
        self._spent[rank].exposed_s += waited_s - idle_s
