"""Which links a message crosses between two meshes, and how messages share them: what the virtual clock knows of a cluster.

A message takes a shortest path, of those the one whose narrowest link has most channels, then the one that comes first in the file. Every
channel carries as much as the port of a rank, each way. Hosts without such links are joined by one switch, and all ranks of a host share its port.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ttlaunch.planning.launch_plan import LaunchPlan

Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True)
class Network:
    """Links that ranks share.

    Attributes:
        places: The place of each rank: its mesh or its host, counted from 0.
        capacities: What each link carries each way, as a multiple of what a rank's own port carries.
        hops: The part of a message's latency that each link adds.
        speed: What carries as much as was given for a port, as a phrase.
        routes: For two places, the directed links that a message crosses: 2 k for link k from its first end, 2 k + 1 from its second.
    """

    places: tuple[int, ...]
    capacities: tuple[float, ...]
    hops: tuple[float, ...]
    routes: Mapping[tuple[int, int], tuple[int, ...]]
    speed: str


def network_of(plan: LaunchPlan, *, over_links: bool | None = None) -> Network | None:
    """Return the links that the ranks of a plan share; None if each has a port of its own, and nothing else counts.

    Args:
        plan: The plan.
        over_links: Whether messages cross the links of the mesh graph; None: if the recipe's sockets do.
    """
    meshes = [row.mesh_id for row in plan.ranks]
    if over_links is None:
        over_links = _uses_fabric(plan)
    if over_links and plan.links and None not in meshes:
        places = {mesh: place for place, mesh in enumerate(sorted({mesh for mesh in meshes if mesh is not None}))}
        found = routes_between([(a, b, float(channels)) for a, b, channels in plan.links])
        routes = {(places[a], places[b]): route for (a, b), route in found.items() if a in places and b in places}
        channels = tuple(float(count) for _, _, count in plan.links)
        of_ranks = tuple(places[mesh] for mesh in meshes if mesh is not None)
        return Network(of_ranks, channels, (1.0,) * len(channels), routes, "each way over each channel of a link")
    hosts = list(dict.fromkeys(row.host for row in plan.ranks))
    if not 1 < len(hosts) < len(plan.ranks):
        return None
    numbers = range(len(hosts))
    routes = {(a, b): (2 * a, 2 * b + 1) for a in numbers for b in numbers if a != b}
    of_hosts = tuple(hosts.index(row.host) for row in plan.ranks)
    return Network(of_hosts, (1.0,) * len(hosts), (0.5,) * len(hosts), routes, "out of and into each host")


def routes_between(
    links: Sequence[tuple[Place, Place, float]],
) -> dict[tuple[Place, Place], tuple[int, ...]]:
    """Return the route from each place to each other one that has a path; see `Network.routes`.

    Args:
        links: Both ends of each link, and its channels.

    Cost: one breadth-first search per place.
    """
    joined: dict[Place, list[tuple[Place, int, float]]] = defaultdict(list)
    for number, (a, b, channels) in enumerate(links):
        joined[a].append((b, 2 * number, channels))
        joined[b].append((a, 2 * number + 1, channels))
    return {(start, end): route for start in list(joined) for end, route in _routes_from(start, joined) if end != start}


def _routes_from(
    start: Place, joined: Mapping[Place, Sequence[tuple[Place, int, float]]]
) -> Iterable[tuple[Place, tuple[int, ...]]]:
    """Return the best route to each place, layer by layer."""
    best: dict[Place, tuple[float, tuple[int, ...]]] = {start: (float("inf"), ())}
    layer = [start]
    while layer:
        found: dict[Place, tuple[float, tuple[int, ...]]] = {}
        for place in layer:
            width, route = best[place]
            for other, link, channels in joined[place]:
                if other in best:
                    continue
                one = min(width, channels), (*route, link)
                if other not in found or (-one[0], one[1]) < (-found[other][0], found[other][1]):
                    found[other] = one
        best |= found
        layer = list(found)
    return [(place, route) for place, (_, route) in best.items()]


def _uses_fabric(plan: LaunchPlan) -> bool:
    config = getattr(plan.program, "config", {}).get("multihost_config") or {}
    return config.get("socket_type") == "fabric"
