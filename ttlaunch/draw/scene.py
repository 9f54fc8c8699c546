"""What a picture shows, without the layout: boxes with ranks on them, and the links between boxes.

A box is a mesh or a switch; where a cluster has no meshes it is a host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ttlaunch.diagnostics.count import counted
from ttlaunch.spec.topology.mesh_graph import counted_parts
from ttlaunch.spec.topology.model import Mesh, MeshId, Switch, Topology

if TYPE_CHECKING:
    from ttlaunch.planning.roles import RoleLayout  # imports pydantic, and most pictures at a start are of programs

_MOST_RANKS = 8


@dataclass(frozen=True)
class Occupant:
    """A rank on a box.

    Attributes:
        role: The rank's role; empty if the picture is not of a recipe.
    """

    rank: int
    host: str
    role: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.role.replace('_', ' ')}".rstrip()


@dataclass(frozen=True)
class Box:
    """A mesh or a switch, or a host where there are no meshes.

    Attributes:
        shape: Rows and columns of devices; None for a host.
        host_shape: Rows and columns of hosts that share the mesh.
        hidden: Ranks that are not listed, because there are too many.
    """

    name: str
    detail: str
    shape: tuple[int, int] | None = None
    host_shape: tuple[int, int] = (1, 1)
    occupants: tuple[Occupant, ...] = ()
    hidden: int = 0

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(occupant.host for occupant in self.occupants))


@dataclass(frozen=True)
class Wire:
    """A link between two boxes, given by their positions in the scene."""

    a: int
    b: int
    channels: int


@dataclass(frozen=True)
class Scene:
    """A whole picture.

    Attributes:
        roles: Every role once, in rank order.
    """

    title: str
    subtitle: str
    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    roles: tuple[str, ...] = ()

    @property
    def channels(self) -> int | None:
        """Return the number of channels that every link has; None if links differ or there are none."""
        found = {wire.channels for wire in self.wires}
        return found.pop() if len(found) == 1 else None

    def neighbours(self, box: int) -> list[tuple[int, int]]:
        """Return the boxes that are linked to a box, each with the channels of the link."""
        ends = [(wire.b, wire.channels) for wire in self.wires if wire.a == box]
        return sorted(ends + [(wire.a, wire.channels) for wire in self.wires if wire.b == box])


def make_scene(topology: Topology, layout: "RoleLayout | None", *, recipe: str = "") -> Scene:
    """Make the picture of a cluster, with roles if a recipe's layout is given."""
    size = layout.world_size if layout else len(topology.bindings)
    occupants = [
        Occupant(rank, str(topology.slots[rank].host.name), layout.roles[rank] if layout else "")
        for rank in range(size)
    ]
    parts = [counted(len(topology.hosts), "host")]
    if topology.meshes:
        parts += counted_parts(topology)
    else:
        parts += [counted(len(topology.slots), "slot")]
    if layout:
        parts.append(f"{recipe} ({layout.layout.name})")
    return Scene(
        title=topology.name,
        subtitle=" · ".join(parts),
        boxes=_meshes(topology, occupants) if topology.meshes else _hosts(topology, occupants),
        wires=_wires(topology),
        roles=tuple(dict.fromkeys(occupant.role for occupant in occupants if occupant.role)),
    )


def _wires(topology: Topology) -> tuple[Wire, ...]:
    """Return one wire for each two linked boxes, with the channels of all links between their devices."""
    meshes = {mesh.id: number for number, mesh in enumerate(topology.meshes)}
    switches: dict[int, int] = {switch.id: len(meshes) + number for number, switch in enumerate(topology.switches)}
    ends = [(meshes[link.a], meshes[link.b], link.channels) for link in topology.links]
    ends += [
        (
            switches[link.switch],
            switches[link.other] if link.other_is_switch else meshes[MeshId(link.other)],
            link.channels,
        )
        for link in topology.switch_links
    ]
    channels: dict[tuple[int, int], int] = {}
    for a, b, count in ends:
        pair = (min(a, b), max(a, b))
        channels[pair] = channels.get(pair, 0) + count
    return tuple(Wire(a, b, count) for (a, b), count in channels.items())


def _meshes(topology: Topology, occupants: Sequence[Occupant]) -> tuple[Box, ...]:
    drivers: dict[str, list[Occupant]] = {}
    for occupant, binding in zip(occupants, topology.bindings, strict=False):
        drivers.setdefault(str(topology.driven(binding)), []).append(occupant)
    parts: list[Mesh | Switch] = [*topology.meshes, *topology.switches]
    return tuple(_mesh(part, drivers.get(str(part), [])) for part in parts)


def _mesh(mesh: Mesh | Switch, occupants: Sequence[Occupant]) -> Box:
    rows, columns = mesh.device_shape
    return _occupied(Box(str(mesh), f"{rows} × {columns}", mesh.device_shape, mesh.host_shape), occupants)


def _hosts(topology: Topology, occupants: Sequence[Occupant]) -> tuple[Box, ...]:
    empty = [Box(str(host.name), counted(host.slots, "slot")) for host in topology.hosts]
    return tuple(_occupied(box, [one for one in occupants if one.host == box.name]) for box in empty)


def _occupied(box: Box, occupants: Sequence[Occupant]) -> Box:
    return replace(box, occupants=tuple(occupants[:_MOST_RANKS]), hidden=max(0, len(occupants) - _MOST_RANKS))
