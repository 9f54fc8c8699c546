"""Join the descriptors of all sub-contexts of a run, and the ranks that drive their meshes, into one cluster.

Ids are local to a descriptor. In the cluster, those of the first descriptor stay, and those of the others are increased so
that no two meshes have the same id.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.topology.model import Binding, Link, Mesh, MeshId, Switch, SwitchLink, Topology

if TYPE_CHECKING:
    from ttlaunch.spec.topology.mesh_graph import MeshGraph
    from ttlaunch.spec.topology.rank_bindings import Bindings


@dataclass(frozen=True)
class Part:
    """The ranks that drive the meshes of one descriptor.

    Sub-contexts that drive different blocks of a descriptor share one part. A sub-context that drives the same block as
    another one gets its own part, with its own copy of the meshes.

    Attributes:
        graph: None if it could not be read.
        path: The descriptor's absolute path.
    """

    bindings: "Bindings"
    graph: "MeshGraph | None"
    path: Path

    @property
    def blocks(self) -> set[tuple[int, int]]:
        """Return the blocks that the part's ranks drive: mesh and host rank."""
        return {(row.binding.mesh_id, row.binding.mesh_host_rank or 0) for row in self.bindings.rows}


def add_part(parts: list[Part], part: Part) -> None:
    """Add the ranks of a sub-context: to a part with free blocks of the same descriptor, otherwise as a new part."""
    for index, other in enumerate(parts):
        if other.path == part.path and not other.blocks & part.blocks:
            rows = [*other.bindings.rows, *part.bindings.rows]
            parts[index] = replace(other, bindings=replace(other.bindings, rows=rows))
            return
    parts.append(part)


def join_parts(parts: Sequence[Part], onto: Topology) -> Topology:
    """Put the meshes, links and ranks of checked parts into a topology that has none."""
    meshes: list[Mesh] = []
    switches: list[Switch] = []
    links: list[Link] = []
    switch_links: list[SwitchLink] = []
    bindings: list[Binding] = []
    architectures = set()
    for part in parts:
        graph = part.graph
        if graph is None:
            continue
        architectures.add(graph.arch)
        # Both are 0 for the first descriptor, which therefore keeps its ids.
        mesh_offset = max((mesh.id + 1 for mesh in meshes), default=0)
        switch_offset = max((switch.id + 1 for switch in switches), default=0)
        meshes += [replace(mesh, id=MeshId(mesh.id + mesh_offset)) for mesh in graph.meshes]
        switches += [replace(switch, id=switch.id + switch_offset) for switch in graph.switches]
        links += [replace(link, a=MeshId(link.a + mesh_offset), b=MeshId(link.b + mesh_offset)) for link in graph.links]
        for link in graph.switch_links:
            other = link.other + (switch_offset if link.other_is_switch else mesh_offset)
            switch_links.append(replace(link, switch=link.switch + switch_offset, other=other))
        for binding in (row.binding for row in part.bindings.rows):
            is_switch = graph.mesh(binding.mesh_id) is None
            own = replace(binding, drives_switch=is_switch)
            offset = switch_offset if is_switch else mesh_offset
            bindings.append(_renumbered(own, offset, part.path) if len(parts) > 1 else own)
    return replace(
        onto,
        arch=architectures.pop() if len(architectures) == 1 else None,
        meshes=tuple(meshes),
        links=tuple(links),
        switches=tuple(switches),
        switch_links=tuple(switch_links),
        bindings=tuple(sorted(bindings, key=lambda binding: binding.rank)),
        mesh_graph_path=parts[0].path if parts else None,
    )


def _renumbered(binding: Binding, offset: int, path: Path) -> Binding:
    mesh_id = MeshId(binding.mesh_id + offset)
    return replace(binding, mesh_id=mesh_id, local_mesh_id=binding.mesh_id, mesh_graph_path=path)
