"""How far meshes are from each other: hops over the links of the mesh graph.

A hop is one link. Ranks of one mesh are 0 hops apart, whatever hosts they run on: nothing between them crosses a link.
"""

from collections import deque
from collections.abc import Mapping

from ttlaunch.topology.model import MeshId, Topology


def neighbours(topology: Topology) -> dict[MeshId, list[MeshId]]:
    """The meshes that a link joins to each mesh, in the order of their ids."""
    joined: dict[MeshId, set[MeshId]] = {mesh.id: set() for mesh in topology.meshes}
    for link in topology.links:
        joined[link.a].add(link.b)
        joined[link.b].add(link.a)
    return {mesh: sorted(others) for mesh, others in joined.items()}


def mesh_hops(topology: Topology) -> Mapping[MeshId, Mapping[MeshId, int]]:
    """Links on a shortest path from each mesh to each mesh that it reaches; meshes without a path are left out.

    Cost: one breadth-first search per mesh.
    """
    joined = neighbours(topology)
    return {mesh: _search(mesh, joined) for mesh in joined}


def _search(start: MeshId, joined: Mapping[MeshId, list[MeshId]]) -> dict[MeshId, int]:
    hops = {start: 0}
    waiting = deque([start])
    while waiting:
        mesh = waiting.popleft()
        for other in joined[mesh]:
            if other not in hops:
                hops[other] = hops[mesh] + 1
                waiting.append(other)
    return hops
