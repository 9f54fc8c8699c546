"""The content of a mesh graph descriptor of either version: the chip, the meshes, the links."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from ttlaunch.diagnostics.count import counted
from ttlaunch.diagnostics.span import Span
from ttlaunch.spec.topology.model import Link, Mesh, MeshId, Switch, SwitchLink

ARCHITECTURES = ("wormhole_b0", "blackhole", "quasar", "cpu", "cuda")
NOT_TENSTORRENT = ("cpu", "cuda")


class _Parts(Protocol):
    """What a mesh graph and a topology have in common."""

    @property
    def meshes(self) -> Sequence[Mesh]: ...
    @property
    def links(self) -> Sequence[Link]: ...
    @property
    def switches(self) -> Sequence[Switch]: ...
    @property
    def switch_links(self) -> Sequence[SwitchLink]: ...


def counted_parts(graph: _Parts) -> list[str]:
    """Return how many meshes, switches and links there are, as `2 meshes`, `1 switch`, `3 links`; no switches without one."""
    parts = [_counted(graph.meshes, "mesh"), *([_counted(graph.switches, "switch")] if graph.switches else [])]
    return [*parts, counted(len(graph.links) + len(graph.switch_links), "link")]


def _counted(rows: Sequence[object], noun: str) -> str:
    return f"{len(rows)} {noun}{'' if len(rows) == 1 else 'es'}"


@dataclass(frozen=True)
class MeshGraph:
    """A descriptor as read, before it is checked against other files.

    Attributes:
        meshes: The meshes in the order of the file; ids are unique unless a diagnostic says otherwise.
        span: The position of the word that begins the list of meshes.
        name: The graph's name; version 1 has none.
        missing: Ids of meshes that do not exist, but that links name.
        ports: Ethernet ports of a chip per direction (N, E, S, W, and Z if it has them); None in version 2, which
            lists the channels that the runtime asks for, not the ports of the chip.
    """

    arch: str
    meshes: Sequence[Mesh]
    links: Sequence[Link]
    span: Span = field(compare=False)
    switches: Sequence[Switch] = ()
    switch_links: Sequence[SwitchLink] = ()
    name: str = field(default="G0", compare=False)
    ports: Mapping[str, int] | None = field(default=None, compare=False)
    missing: frozenset[int] = field(default=frozenset(), compare=False)

    def mesh(self, mesh_id: int) -> Mesh | None:
        """Return the first mesh with this id."""
        return self._mesh_by_id.get(mesh_id)

    def driven(self, number: int) -> Mesh | Switch | None:
        """Return what a rank drives whose `mesh_id` is this number: a mesh, or else a switch."""
        return self.mesh(number) or next((switch for switch in self.switches if switch.id == number), None)

    @cached_property
    def _mesh_by_id(self) -> dict[int, Mesh]:
        return {mesh.id: mesh for mesh in reversed(self.meshes)}

    @cached_property
    def mesh_ids(self) -> list[MeshId]:
        return sorted({mesh.id for mesh in self.meshes})

    @property
    def ids_as_text(self) -> str:
        """Return the ids as text: `mesh 0`, `meshes 0, 1`, `meshes 0 to 31`, or `mesh 0 and switch 1`."""
        parts = [numbered("mesh", "meshes", self.mesh_ids)] if self.meshes else []
        parts += (
            [numbered("switch", "switches", sorted(switch.id for switch in self.switches))] if self.switches else []
        )
        return " and ".join(parts)


def numbered(singular: str, plural: str, ids: Sequence[int]) -> str:
    """Write ids in ascending order as text: `mesh 0`, `meshes 0, 1`, or `meshes 0 to 31`."""
    if len(ids) == 1:
        return f"{singular} {ids[0]}"
    if len(ids) > 2 and list(ids) == list(range(ids[0], ids[-1] + 1)):  # noqa: PLR2004 - "0 to 1" is no shorter
        return f"{plural} {ids[0]} to {ids[-1]}"
    shown = ", ".join(str(number) for number in ids[:16])
    return f"{plural} {shown}" + (", …" if len(ids) > 16 else "")  # noqa: PLR2004 - fits on a line
