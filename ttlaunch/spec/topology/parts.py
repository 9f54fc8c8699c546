"""Ranks and the descriptor they drive, of which a run with sub-contexts has several, joined into one cluster.

Ids are local to a descriptor. In the cluster those of the first keep their numbers and the others follow, so that no two
meshes have the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.spec.topology.model import Binding, Link, Mesh, MeshId, Switch, SwitchLink

if TYPE_CHECKING:
    from ttlaunch.spec.topology.mesh_graph import MeshGraph
    from ttlaunch.spec.topology.rank_bindings import Bindings


@dataclass(frozen=True)
class Part:
    """The ranks that drive the meshes of one descriptor.

    Sub-contexts that drive different blocks of it share them; each that drives a block of another has a copy of its own.

    Attributes:
        graph: None if it could not be read.
        path: Of the descriptor, absolute.
    """

    bindings: "Bindings"
    graph: "MeshGraph | None"
    path: Path

    @property
    def blocks(self) -> set[tuple[int, int]]:
        """What its ranks drive: mesh and host rank."""
        return {(row.binding.mesh_id, row.binding.mesh_host_rank or 0) for row in self.bindings.rows}


def add_part(parts: list[Part], part: Part) -> None:
    """Add the ranks of a sub-context: to a part with free blocks of the same descriptor, else by themselves."""
    for index, other in enumerate(parts):
        if other.path == part.path and not other.blocks & part.blocks:
            rows = [*other.bindings.rows, *part.bindings.rows]
            parts[index] = replace(other, bindings=replace(other.bindings, rows=rows))
            return
    parts.append(part)


@dataclass
class Joined:
    """What the parts say together; meshes and switches have ids of their own, bindings are in rank order."""

    arch: str | None
    meshes: tuple[Mesh, ...] = ()
    links: tuple[Link, ...] = ()
    switches: tuple[Switch, ...] = ()
    switch_links: tuple[SwitchLink, ...] = ()
    bindings: tuple[Binding, ...] = ()
    mesh_graph_path: Path | None = None


def join_parts(parts: Sequence[Part]) -> Joined:
    """Join parts that have been checked."""
    graphs = [part.graph for part in parts if part.graph]
    architectures = {graph.arch for graph in graphs}
    joined = Joined(architectures.pop() if len(architectures) == 1 else None)
    for part in parts:
        if part.graph is not None:
            meshes_before = max((mesh.id + 1 for mesh in joined.meshes), default=0)
            switches_before = max((switch.id + 1 for switch in joined.switches), default=0)
            _add_graph(joined, part.graph, meshes_before, switches_before)
            bindings = [row.binding for row in part.bindings.rows]
            if len(parts) > 1:
                bindings = [_renumbered(binding, meshes_before, part.path) for binding in bindings]
            joined.bindings += tuple(bindings)
    joined.bindings = tuple(sorted(joined.bindings, key=lambda binding: binding.rank))
    joined.mesh_graph_path = parts[0].path if parts else None
    return joined


def _add_graph(joined: Joined, graph: "MeshGraph", meshes_before: int, switches_before: int) -> None:
    if not meshes_before and not switches_before:
        joined.meshes, joined.links = tuple(graph.meshes), tuple(graph.links)
        joined.switches, joined.switch_links = tuple(graph.switches), tuple(graph.switch_links)
        return
    joined.meshes += tuple(replace(mesh, id=MeshId(mesh.id + meshes_before)) for mesh in graph.meshes)
    joined.links += tuple(
        replace(link, a=MeshId(link.a + meshes_before), b=MeshId(link.b + meshes_before)) for link in graph.links
    )
    joined.switches += tuple(replace(switch, id=switch.id + switches_before) for switch in graph.switches)
    joined.switch_links += tuple(
        replace(
            link,
            switch=link.switch + switches_before,
            other=link.other + (switches_before if link.other_is_switch else meshes_before),
        )
        for link in graph.switch_links
    )


def _renumbered(binding: Binding, meshes_before: int, path: Path) -> Binding:
    mesh_id = MeshId(binding.mesh_id + meshes_before)
    return replace(binding, mesh_id=mesh_id, local_mesh_id=binding.mesh_id, mesh_graph_path=path)
