"""The links that messages of ranks on a virtual clock share, if ranks do not have just a port each."""

from collections.abc import Mapping
from dataclasses import dataclass

from ttlaunch.runtime.comm.flow_table import Port
from ttlaunch.runtime.world import Rank

WITHIN_S, WITHIN_BYTES_PER_S = 50e-6, 8e9
"""What a message between two ranks of one place costs, whatever lies between places: measured between processes of one machine."""


@dataclass(frozen=True)
class Routes:
    """Where ranks are, and what lies between.

    Attributes:
        places: The place of each rank.
        links: For two places, the directed links that a message crosses; a pair without an entry has none, and its ranks use their ports.
        bytes_per_s: What each link, of each direction, carries.
        latencies_s: What each link, of each direction, adds to the time of the first byte.
    """

    places: tuple[int, ...]
    links: Mapping[tuple[int, int], tuple[int, ...]]
    bytes_per_s: Mapping[int, float]
    latencies_s: Mapping[int, float]

    def ports(self, source: Rank, dest: Rank) -> tuple[Port, ...] | None:
        """Return what a message shares with others; None if that is the ranks' ports."""
        a, b = self.places[source], self.places[dest]
        if a == b:
            return ("within out", source), ("within in", dest)
        route = self.links.get((a, b))
        return None if route is None else tuple(("link", Rank(link)) for link in route)

    def latency_s(self, source: Rank, dest: Rank) -> float | None:
        """Return how long the first byte travels; None if no links say so."""
        a, b = self.places[source], self.places[dest]
        if a == b:
            return WITHIN_S
        route = self.links.get((a, b))
        return None if route is None else sum(self.latencies_s[link] for link in route)

    def capacity(self, port: Port) -> float | None:
        """Return the bytes per second of what a message shares; None for the ports of ranks."""
        kind, number = port
        if kind == "link":
            return self.bytes_per_s[number]
        return WITHIN_BYTES_PER_S if kind.startswith("within") else None
