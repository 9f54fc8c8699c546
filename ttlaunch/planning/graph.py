"""Which ranks communicate, and the distance between their meshes in hops over the links of the mesh graph.

A hop is one link, to a mesh or to a switch. Ranks of one mesh are 0 hops apart, even on different hosts, because
their messages cross no link.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from ttlaunch.planning.roles import RoleLayout, pairs
from ttlaunch.spec.topology.model import Mesh, Rank, Switch, Topology


class Node(NamedTuple):
    """A mesh or a switch; a mesh and a switch may have the same number."""

    is_switch: bool
    id: int


def node_of(driven: Mesh | Switch) -> Node:
    return Node(isinstance(driven, Switch), driven.id)


def hops_between(topology: Topology) -> Mapping[Node, Mapping[Node, int]]:
    """Count the links on a shortest path between each two meshes or switches; those without a path are left out.

    Cost: one breadth-first search per mesh and switch.
    """
    joined = _neighbours(topology)
    return {start: _search(start, joined) for start in joined}


def links_of(topology: Topology) -> list[tuple[Node, Node, float]]:
    """Return both ends of each link, and its channels."""
    found = [(Node(is_switch=False, id=one.a), Node(is_switch=False, id=one.b), one.channels) for one in topology.links]
    found += [
        (Node(is_switch=True, id=one.switch), Node(one.other_is_switch, one.other), one.channels)
        for one in topology.switch_links
    ]
    return [(a, b, float(max(1, channels))) for a, b, channels in found]


def _neighbours(topology: Topology) -> dict[Node, list[Node]]:
    meshes = [Node(is_switch=False, id=mesh.id) for mesh in topology.meshes]
    joined: dict[Node, list[Node]] = {node: [] for node in meshes}
    joined |= {Node(is_switch=True, id=switch.id): [] for switch in topology.switches}
    for a, b, _ in links_of(topology):
        joined[a].append(b)
        joined[b].append(a)
    return joined


def _search(start: Node, joined: Mapping[Node, list[Node]]) -> dict[Node, int]:
    hops = {start: 0}
    waiting = deque([start])
    while waiting:
        node = waiting.popleft()
        for other in joined[node]:
            if other not in hops:
                hops[other] = hops[node] + 1
                waiting.append(other)
    return hops


def traffic(layout: RoleLayout) -> dict[tuple[Rank, Rank], float]:
    """Return the pairs of ranks that communicate, each once, smaller rank first, with the weight of all their flows."""
    found: dict[tuple[Rank, Rank], float] = {}
    for flow in layout.flows:
        for a, b in pairs(flow, layout.roles):
            pair = (min(a, b), max(a, b))
            found[pair] = found.get(pair, 0.0) + flow.weight
    return found
