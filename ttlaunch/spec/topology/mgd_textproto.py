"""Read a mesh graph descriptor, version 2 (`mgd.textproto`): kinds of meshes, the graph that links them, its root.

The rules are those of the vendor's runtime, which takes one graph of type FABRIC. What its parser silently accepts
(an unknown field, a link of a mesh to itself, a root with another id) is an error here, with a line number.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ttlaunch.diagnostics.diagnostic import Diagnostic, has_errors, place_of
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import did_you_mean, listed, shown
from ttlaunch.no_cycles import collection_paused
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.findings import Findings
from ttlaunch.spec.located.nodes import Key, MapNode, span_of
from ttlaunch.spec.located.schema import check_schema
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.graph_rules import check_graph
from ttlaunch.spec.topology.mesh_graph import MeshGraph
from ttlaunch.spec.topology.mgd_connections import Connections, given_kinds, id_span, instance_key
from ttlaunch.spec.topology.mgd_schema import (
    DescriptorFile,
    GraphDescriptor,
    LogicalNode,
    MeshDescriptor,
    NodeRef,
    PhysicalPosition,
    Pinning,
    SwitchDescriptor,
)
from ttlaunch.spec.topology.model import Mesh, MeshId, Switch
from ttlaunch.spec.topology.textproto import parse_textproto
from ttlaunch.spec.topology.textproto_shape import shape_message

_FABRIC = "FABRIC"
_LONGEST_PATTERN = 1000
_PATTERN = re.compile(r"[0-9A-Za-z\[\]{}()|.*+?^$\\, -]+\Z")

Descriptor = MeshDescriptor | SwitchDescriptor


@dataclass(frozen=True)
class ReadDescriptor:
    """A descriptor of version 2: the mesh graph that it describes, and the file as written."""

    graph: MeshGraph
    file: DescriptorFile


@collection_paused()
def parse_mesh_graph_textproto(source: Source) -> tuple[ReadDescriptor | None, list[Diagnostic]]:
    """Read the text of a descriptor; None if it is too broken for other files to be checked against it."""
    message, found = parse_textproto(source, codes=TOPOLOGY)
    if message is None:
        return None, found
    root, found = shape_message(message, DescriptorFile, codes=TOPOLOGY)
    file, mistakes = check_schema(DescriptorFile, root, codes=TOPOLOGY)
    found = sorted(found + mistakes, key=place_of)
    if file is None:
        return None, found
    reading = _Reading(file, root)
    graph = reading.read()
    found += reading.findings.found
    return (ReadDescriptor(graph, file) if graph else None), found


@dataclass
class _Reading:
    """The state while one file is converted to a mesh graph.

    Attributes:
        lost: Whether meshes or their shapes are not known, so that links and bindings cannot be checked.
    """

    file: DescriptorFile
    root: MapNode
    lost: bool = False
    meshes: dict[int, Mesh] = field(default_factory=dict)
    switches: dict[int, Switch] = field(default_factory=dict)

    @cached_property
    def findings(self) -> Findings:
        return Findings(self.root)

    @cached_property
    def rows(self) -> list[tuple[tuple[Key, ...], str, Descriptor]]:
        """Return the descriptors of meshes and switches, each with its place and `mesh` or `switch`."""
        meshes = [(("mesh_descriptors", index), "mesh", row) for index, row in enumerate(self.file.mesh_descriptors)]
        switches = enumerate(self.file.switch_descriptors)
        return [*meshes, *((("switch_descriptors", index), "switch", row) for index, row in switches)]

    @cached_property
    def kinds(self) -> dict[tuple[str, str], Descriptor]:
        """Return the descriptors of meshes and switches by name; if two have the same name, the first one."""
        return {(kind, row.name): row for _, kind, row in reversed(self.rows)}

    def read(self) -> MeshGraph | None:
        if not self.rows:
            message = "the descriptor has neither `mesh_descriptors` nor `switch_descriptors`"
            self.findings.add(codes.MISSING_KEY, message, self.root.span, label="expected a mesh")
            return None
        self.check_descriptors()
        top = self.file.top_level_instance
        graph = self.graph(top)
        connections = Connections(self.findings, self.root, self.meshes, self.switches)
        if graph is None:
            self.instance(top, ("top_level_instance",))
        else:
            row, index = graph
            for number, instance in enumerate(row.instances):
                self.instance(instance, ("graph_descriptors", index, "instances", number))
            if not self.lost:
                connections.read(row, index)
        if self.lost or (not self.meshes and not self.switches):
            return None
        found = MeshGraph(
            self.rows[0][2].arch.lower(),
            tuple(self.meshes.values()),
            tuple(connections.links()),
            self.root.keys.get("mesh_descriptors", self.root.span),
            switches=tuple(self.switches.values()),
            switch_links=tuple(connections.switch_links()),
            name=graph[0].name if graph else "G0",
            missing=frozenset(connections.missing),
        )
        _check_pinnings(self.file.pinnings, self.findings, self.meshes)
        # After a mistake in a part of the graph, rules for the whole graph would only report its consequences.
        self.findings.found += [] if has_errors(self.findings.found) else check_graph(found)
        return found

    def check_descriptors(self) -> None:
        """Check that names are unique, that shapes fit, and that all descriptors have one architecture."""
        first: dict[str, Span] = {}
        chip: tuple[str, Span] | None = None
        for path, _, row in self.rows:
            self.check_name(row.name, (*path, "name"), first)
            span = span_of(self.root, (*path, "arch"))
            if chip and chip[0] != row.arch:
                message = f"descriptor `{shown(row.name)}` has arch {row.arch}, others have {chip[0]}"
                other = (chip[1], "the first one")
                self.findings.add(codes.MIXED_ARCHITECTURES, message, span, label=f"expected {chip[0]}", other=other)
            chip = chip or (row.arch, span)
            self.check_shape(row, path)
        graphs: dict[str, Span] = {}
        for index, graph in enumerate(self.file.graph_descriptors):
            self.check_name(graph.name, ("graph_descriptors", index, "name"), graphs)

    def check_name(self, name: str, path: tuple[Key, ...], first: dict[str, Span]) -> None:
        span = span_of(self.root, path)
        if name in first:
            message = f"descriptor `{shown(name)}` is defined twice"
            self.findings.twice(codes.NAME_TWICE, message, span, first=first[name], verb="defined")
        first.setdefault(name, span)

    def check_shape(self, row: Descriptor, path: tuple[Key, ...]) -> None:
        devices, name = row.device_topology, shown(row.name)
        if devices.dim_types and len(devices.dim_types) != len(devices.dims):
            message = f"`{name}` has {len(devices.dim_types)} `dim_types` for {len(devices.dims)} `dims`"
            place = (*path, "device_topology", "dim_types")
            self.findings.add(codes.DIM_TYPES, message, place, label=f"expected {len(devices.dims)}")
        if isinstance(row, MeshDescriptor):
            hosts = row.host_topology.dims
            if any(extent % parts for extent, parts in zip(devices.dims, hosts, strict=True)):
                self.lost = True
                message = f"`{name}` has {devices.dims} devices, which its {hosts} hosts cannot share evenly"
                place, other = (*path, "host_topology", "dims"), ((*path, "device_topology", "dims"), "devices")
                self.findings.add(codes.SHAPES, message, place, label="hosts", other=other)
        if row.express_connections:
            message = f"`{name}` has `express_connections`, which the runtime does not take"
            self.findings.add(codes.NOT_IN_RUNTIME, message, (*path, "express_connections"), hint="remove them")
        for number, link in enumerate(row.express_links):
            if link.dim_idx >= len(devices.dims):
                message = f"`{name}` has express links along dimension {link.dim_idx} of {len(devices.dims)}"
                place = (*path, "express_links", number, "dim_idx")
                self.findings.add(codes.DEVICE_NUMBER, message, place, label="expected 0 or 1")

    def graph(self, top: NodeRef) -> tuple[GraphDescriptor, int] | None:
        """Return the graph that the root names, and its place among the graphs; report what is wrong with it."""
        rows = self.file.graph_descriptors
        if len(given_kinds(top)) != 1:
            self.one_of(top, ("top_level_instance",))
            return None
        if len(rows) > 1:
            message = f"the descriptor has {len(rows)} graphs; the runtime takes one"
            first = (("graph_descriptors", 0, "name"), "the first")
            place = ("graph_descriptors", 1, "name")
            self.findings.add(codes.NOT_ONE_FABRIC, message, place, label="the second", other=first)
        if top.graph is None or len(rows) > 1:
            return None
        self.check_top("graph", top.graph.graph_id)
        index = next((i for i, row in enumerate(rows) if row.name == top.graph.graph_descriptor), None)
        if index is None:
            self.unknown("graph", top.graph.graph_descriptor, ("top_level_instance",))
            return None
        row = rows[index]
        if row.type != _FABRIC:
            message = f'graph `{shown(row.name)}` has type "{shown(row.type)}"; the runtime takes "{_FABRIC}"'
            place = ("graph_descriptors", index, "type")
            self.findings.add(codes.NOT_ONE_FABRIC, message, place, label=f'expected "{_FABRIC}"')
        return row, index

    def check_top(self, kind: str, number: int) -> None:
        if number:
            message = f"the root has `{kind}_id` {number}; 0 was expected"
            self.findings.add(codes.TOP_LEVEL, message, ("top_level_instance", kind, f"{kind}_id"), label="expected 0")

    def one_of(self, node: NodeRef, path: tuple[Key, ...]) -> None:
        given = given_kinds(node)
        what = f"names a {' and a '.join(given)}" if given else "names nothing"
        message = f"a reference {what}; one of `mesh`, `graph` and `switch` was expected"
        self.findings.add(codes.WRONG_VALUE, message, path)

    def instance(self, node: NodeRef, path: tuple[Key, ...]) -> None:
        """Add one mesh or switch to the graph."""
        is_top = path[0] == "top_level_instance"
        key = instance_key(node)
        if key is None:
            if not is_top:
                self.one_of(node, path)
            return
        kind, number = key
        if kind == "graph":
            if not is_top:
                message = "a graph has a graph as an instance; the runtime takes meshes and switches"
                self.findings.add(codes.NOT_ONE_FABRIC, message, (*path, "graph"))
            return
        if is_top:
            self.check_top(kind, number)
        name = getattr(getattr(node, kind), f"{kind}_descriptor")
        row, span = self.kinds.get((kind, name)), id_span(self.root, path, kind)
        if row is None:
            self.lost = True
            self.unknown(kind, name, path)
            return
        taken = (self.meshes if kind == "mesh" else self.switches).get(number)
        if taken is not None:
            self.lost = True
            message = f"{kind} {number} is defined twice"
            self.findings.twice(codes.MESH_TWICE, message, span, first=taken.span, verb="defined")
        elif isinstance(row, MeshDescriptor):
            self.meshes[number] = _mesh(number, row, span)
        else:
            self.switches[number] = _switch(number, row, span)

    def unknown(self, kind: str, name: str, path: tuple[Key, ...]) -> None:
        known = [shown(row.name) for row in getattr(self.file, f"{kind}_descriptors")]
        expected = f"expected {listed(known)}" if known else f"there is no `{kind}_descriptors`"
        message = f"a reference names {kind} descriptor `{shown(name)}`, which does not exist"
        place, hint = (*path, kind, f"{kind}_descriptor"), "".join(did_you_mean(name, known))
        self.findings.add(codes.REFERENCE, message, place, label=expected, hint=hint)


def _dim_types(row: Descriptor) -> tuple[str, str]:
    rows, columns = [*row.device_topology.dim_types, "LINE", "LINE"][:2]
    return rows, columns


def _mesh(number: int, row: MeshDescriptor, span: Span) -> Mesh:
    rows, columns = row.device_topology.dims
    host_rows, host_columns = row.host_topology.dims
    shape = (rows, columns), (host_rows, host_columns)
    channels = row.channels
    return Mesh(MeshId(number), row.name, *shape, span, _dim_types(row), channels.count, channels.policy)


def _switch(number: int, row: SwitchDescriptor, span: Span) -> Switch:
    rows, columns = row.device_topology.dims
    return Switch(number, row.name, (rows, columns), span, _dim_types(row), row.channels.count, row.channels.policy)


def _check_pinnings(rows: Sequence[Pinning], findings: Findings, meshes: Mapping[int, Mesh]) -> None:
    """Check that pinnings name existing devices, each only once."""
    taken: dict[tuple[int, int, str | None], tuple[Key, ...]] = {}
    for index, row in enumerate(rows):
        for number, node in enumerate(row.logical_fabric_node_id):
            path: tuple[Key, ...] = ("pinnings", index, "logical_fabric_node_id", number)
            _check_choice(node, ("mesh_id", "chip_id"), findings, path=path)
            _check_node(node, findings, path=path, mesh=meshes.get(-1 if node.mesh_id is None else node.mesh_id))
            if node.mesh_id is None or node.chip_id is None:
                continue
            key, place = (node.mesh_id, node.chip_id, row.board_revision), (*path, "chip_id")
            if key in taken:
                message = f"device {node.chip_id} of mesh {node.mesh_id} is pinned twice"
                findings.twice(codes.PINNED_TWICE, message, place, first=taken[key], verb="pinned")
            taken.setdefault(key, place)
        for number, position in enumerate(row.physical_asic_position):
            path = ("pinnings", index, "physical_asic_position", number)
            _check_choice(position, ("tray_id", "asic_location"), findings, path=path)


def _check_choice(
    node: LogicalNode | PhysicalPosition, keys: tuple[str, str], findings: Findings, *, path: tuple[Key, ...]
) -> None:
    """For each key, exactly one of the number and its pattern is given, and the pattern is valid."""
    for key in keys:
        pattern, place = getattr(node, f"{key}_regex"), (*path, f"{key}_regex")
        if (getattr(node, key) is None) == (pattern is None):
            many = "neither" if pattern is None else "both"
            message = f"a pinning has {many} of `{key}` and `{key}_regex`; one of them was expected"
            findings.add(codes.WRONG_VALUE, message, path if pattern is None else place)
        elif pattern is not None and (len(pattern) > _LONGEST_PATTERN or not _PATTERN.match(pattern)):
            message = f"`{key}_regex` is no pattern of numbers"
            findings.add(codes.WRONG_VALUE, message, place, label='expected such as "0-3,8"')


def _check_node(node: LogicalNode, findings: Findings, *, path: tuple[Key, ...], mesh: Mesh | None) -> None:
    if node.mesh_id is not None and mesh is None:
        message = f"a pinning names mesh {node.mesh_id}, which does not exist"
        findings.add(codes.REFERENCE, message, (*path, "mesh_id"), label=f"no mesh has id {node.mesh_id}")
    if mesh is not None and node.chip_id is not None:
        count = mesh.device_shape[0] * mesh.device_shape[1]
        if node.chip_id >= count:
            message = f"a pinning names device {node.chip_id} of mesh {mesh.id}, which has {count} devices"
            findings.add(codes.DEVICE_NUMBER, message, (*path, "chip_id"), label=f"expected 0 to {count - 1}")
