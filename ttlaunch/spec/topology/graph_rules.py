"""Rules for a mesh graph of either version: every mesh is connected, a ring has at least three devices, links fit the ports."""

from collections.abc import Iterator, Mapping

from ttlaunch.diagnostics.diagnostic import Diagnostic, Severity, mistake_at
from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import listed
from ttlaunch.spec.located.findings import first_gap
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.mesh_graph import MeshGraph
from ttlaunch.spec.topology.model import Link, Mesh, Switch

_SMALLEST_RING = 3
_MOST_SUMMED = 8  # more would not fit on a line


def check_graph(graph: MeshGraph) -> list[Diagnostic]:
    """Apply the rules for a mesh graph, in a fixed order."""
    return [*_check_ids(graph), *_check_rings(graph), *_check_ports(graph), *_check_connected(graph)]


def free_ports(mesh: Mesh, ports: dict[str, int], device: int) -> int:
    """Count the ethernet ports of a device that no neighbour inside its mesh takes."""
    rows, columns = mesh.device_shape
    row, column = divmod(device, columns)
    vertical, horizontal = _open_ends(mesh)
    free = ports.get("Z", 0)
    free += ports["N"] if row == 0 and vertical else 0
    free += ports["S"] if row == rows - 1 and vertical else 0
    free += ports["W"] if column == 0 and horizontal else 0
    free += ports["E"] if column == columns - 1 and horizontal else 0
    return free


def _open_ends(mesh: Mesh) -> tuple[bool, bool]:
    """Return whether the ports at both ends are free, of rows and of columns. A ring takes them, if it is more than a line."""
    extents = zip(mesh.dim_types, mesh.device_shape, strict=True)
    rows, columns = (kind != "RING" or extent < _SMALLEST_RING for kind, extent in extents)
    return rows, columns


def missing_z_ports(graph: MeshGraph) -> int:
    """Return how many more Z ports each chip would need so that every link has a port."""
    ports = dict(graph.ports or {})
    ends: dict[int, list[tuple[Link, int]]] = {}
    for link in graph.links:
        ends.setdefault(link.a, []).append((link, 0))
        ends.setdefault(link.b, []).append((link, 1))
    most = 0
    for mesh in graph.meshes:
        links = ends.get(mesh.id, [])
        count, devices = sum(link.channels for link, _ in links), mesh.device_shape[0] * mesh.device_shape[1]
        most = max(most, -(-(count - _edge_ports(mesh, ports)) // devices))
        used: dict[int, int] = {}
        for link, end in links:
            for joined in link.devices:
                used[joined[end]] = used.get(joined[end], 0) + joined[2]
        most = max([most, *(taken - free_ports(mesh, ports, device) for device, taken in used.items())])
    return most


def check_mesh_gap(spans: Mapping[int, Span]) -> Iterator[Diagnostic]:
    """Warn of a gap in the ids of meshes; `spans` has the place of each id."""
    gap = first_gap(spans)
    if gap:
        missing, above = gap
        message, label = f"mesh ids have a gap: there is a mesh {above} but no mesh {missing}", f"expected {missing}"
        yield mistake_at(codes.MESH_GAP, message, spans[above], label=label, severity=Severity.WARNING)


def _check_ids(graph: MeshGraph) -> Iterator[Diagnostic]:
    """Warn of a gap in the ids of a graph of version 2; `mgd_yaml` checks those of version 1."""
    if graph.ports is None and len(graph.mesh_ids) > 1:
        yield from check_mesh_gap({mesh.id: mesh.span for mesh in reversed(graph.meshes)})


def _check_rings(graph: MeshGraph) -> Iterator[Diagnostic]:
    reported: set[tuple[str, tuple[int, int]]] = set()
    grids: list[tuple[str, str, Mesh | Switch]] = [("mesh", mesh.board, mesh) for mesh in graph.meshes]
    grids += [("switch", switch.name, switch) for switch in graph.switches]
    for noun, kind, grid in grids:
        for extent, dim_type, what in zip(grid.device_shape, grid.dim_types, ("rows", "columns"), strict=True):
            if dim_type == "RING" and extent < _SMALLEST_RING and (kind, grid.device_shape) not in reported:
                reported.add((kind, grid.device_shape))
                many = f"{extent} {what}" if extent > 1 else f"1 {what[:-1]}"
                message = f"{noun} {grid.id} has a ring of {many}, which is no more than a line"
                yield mistake_at(codes.SMALL_RING, message, grid.span, label=_shape(grid), severity=Severity.WARNING)


def _check_ports(graph: MeshGraph) -> Iterator[Diagnostic]:
    """Check that links fit the ports at the edge of each mesh. Only version 1 gives the number of ports per chip."""
    if graph.ports is None:
        return
    ports = dict(graph.ports)
    used: dict[tuple[int, int], tuple[int, Link]] = {}
    edge_ports = {mesh.id: _edge_ports(mesh, ports) for mesh in graph.meshes}
    channels: dict[int, list[Link]] = {}
    for link in graph.links:
        for end, linked_id in ((0, link.a), (1, link.b)):
            channels.setdefault(linked_id, []).append(link)
            for joined in link.devices:
                key = (int(linked_id), joined[end])
                used[key] = (used.get(key, (0, link))[0] + joined[2], link)
    full, reported = set(), set()  # a link with too many channels is one mistake, and not one at each of its ends
    for (mesh_id, device), (count, link) in used.items():
        mesh = graph.mesh(mesh_id)
        free = free_ports(mesh, ports, device) if mesh else count
        if mesh and count > free and mesh_id not in full and link.span not in reported:
            full.add(mesh_id)
            reported.add(link.span)
            message = f"device {device} of mesh {mesh_id} has {count} channels to other meshes but {free} free ports"
            yield mistake_at(codes.TOO_MANY_CHANNELS, message, link.span, other=(mesh.span, _shape(mesh)))
    for mesh_id, links in channels.items():
        count, mesh = sum(link.channels for link in links), graph.mesh(mesh_id)
        if mesh and count > edge_ports[mesh.id] and mesh_id not in full and links[-1].span not in reported:
            reported.add(links[-1].span)
            message = f"mesh {mesh_id} has {count} channels to other meshes but {edge_ports[mesh.id]} ports at its edge"
            sums = f"{' + '.join(str(link.channels) for link in links[:_MOST_SUMMED])} = {count} channels"
            label = sums if 1 < len(links) <= _MOST_SUMMED else ""
            other = (mesh.span, _shape(mesh))
            yield mistake_at(codes.TOO_MANY_CHANNELS, message, links[-1].span, label=label, other=other)


def _edge_ports(mesh: Mesh, ports: dict[str, int]) -> int:
    """Return the sum of `free_ports` over all devices of a mesh, without a loop over them."""
    rows, columns = mesh.device_shape
    vertical, horizontal = _open_ends(mesh)
    edge = columns * (ports["N"] + ports["S"]) if vertical else 0
    edge += rows * (ports["W"] + ports["E"]) if horizontal else 0
    return edge + rows * columns * ports.get("Z", 0)


def _shape(mesh: Mesh | Switch) -> str:
    return f"{mesh.device_shape[0]} × {mesh.device_shape[1]} devices"


def _check_connected(graph: MeshGraph) -> Iterator[Diagnostic]:
    """Warn of meshes that are not connected to the first one. A graph without any link may be intended."""
    if not graph.links and not graph.switch_links:
        return
    parent: dict[tuple[bool, int], tuple[bool, int]] = {(False, mesh.id): (False, mesh.id) for mesh in graph.meshes}
    parent |= {(True, switch.id): (True, switch.id) for switch in graph.switches}

    def root(node: tuple[bool, int]) -> tuple[bool, int]:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for link in graph.links:
        parent[root((False, link.b))] = root((False, link.a))
    for joined in graph.switch_links:
        parent[root((True, joined.switch))] = root((joined.other_is_switch, joined.other))
    if not graph.meshes:
        return
    home = root((False, graph.meshes[0].id))
    apart = [mesh for mesh in graph.meshes if root((False, mesh.id)) != home]
    if apart:
        names = listed([mesh.id for mesh in apart], last="and", quote="")
        message = f"no link leads from mesh {graph.meshes[0].id} to mesh{'es' if len(apart) > 1 else ''} {names}"
        place, other = apart[0].span, (graph.meshes[0].span, "")
        severity = Severity.WARNING
        yield mistake_at(codes.DISCONNECTED, message, place, label="not connected", other=other, severity=severity)
