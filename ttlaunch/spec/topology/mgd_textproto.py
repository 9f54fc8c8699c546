"""Read a mesh graph descriptor, version 2 (`mgd.textproto`): kinds of meshes, the graph that links them, its root.

The rules are those of the vendor's runtime, which takes one graph of type FABRIC. What its parser accepts in silence
(an unknown field, a link of a mesh to itself, a root with another id) is an error here, with a line number.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label, has_errors
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import closest, listed, shown
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.collecting import collection_paused
from ttlaunch.spec.located.nodes import Key, MapNode, node_at, span_of
from ttlaunch.spec.located.schema import check_schema
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.graph_rules import check_graph
from ttlaunch.spec.topology.mesh_graph import MeshGraph
from ttlaunch.spec.topology.mgd_connections import Connections, instance_key
from ttlaunch.spec.topology.mgd_schema import DescriptorFile, GraphDescriptor, MeshDescriptor, NodeRef, SwitchDescriptor
from ttlaunch.spec.topology.model import Mesh, MeshId, Switch
from ttlaunch.spec.topology.pinnings import check_pinnings
from ttlaunch.spec.topology.textproto import parse_textproto
from ttlaunch.spec.topology.textproto_shape import shape_message

_FABRIC = "FABRIC"


@dataclass(frozen=True)
class ReadDescriptor:
    """A descriptor of version 2: what it means, and as written."""

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
    found = sorted(found + mistakes, key=_place)
    if file is None:
        return None, found
    reading = _Reading(file, root)
    graph = reading.read()
    found += reading.found
    return (ReadDescriptor(graph, file) if graph else None), found


def _place(diagnostic: Diagnostic) -> tuple[int, int]:
    return (diagnostic.primary.span.line, diagnostic.primary.span.column) if diagnostic.primary else (0, 0)


@dataclass
class _Reading:
    """One file on its way to a mesh graph.

    Attributes:
        lost: Whether meshes or their shapes are not known, so that links and bindings cannot be checked.
    """

    file: DescriptorFile
    root: MapNode
    found: list[Diagnostic] = field(default_factory=list)
    lost: bool = False
    meshes: dict[int, Mesh] = field(default_factory=dict)
    switches: dict[int, Switch] = field(default_factory=dict)

    def read(self) -> MeshGraph | None:
        if not self.file.mesh_descriptors and not self.file.switch_descriptors:
            message = "the descriptor has neither `mesh_descriptors` nor `switch_descriptors`"
            self.found.append(Diagnostic(codes.MISSING_KEY, message, Label(self.root.span, "expected a mesh")))
            return None
        self.check_descriptors()
        top = self.file.top_level_instance
        graph = self.graph(top)
        connections = Connections(self.root, self.meshes, self.switches)
        if graph is None:
            self.instance(top, ("top_level_instance",))
        else:
            row, index = graph
            for number, instance in enumerate(row.instances):
                self.instance(instance, ("graph_descriptors", index, "instances", number))
            if not self.lost:
                connections.read(row, index)
        self.found += connections.found
        if self.lost or (not self.meshes and not self.switches):
            return None
        found = MeshGraph(
            self.architecture(),
            tuple(self.meshes.values()),
            tuple(connections.links()),
            self.root.keys.get("mesh_descriptors", self.root.span),
            switches=tuple(self.switches.values()),
            switch_links=tuple(connections.switch_links),
            name=graph[0].name if graph else "G0",
        )
        self.found += check_pinnings(self.file.pinnings, self.root, self.meshes)
        self.found += [] if has_errors(self.found) else check_graph(found)
        return found

    @cached_property
    def kinds(self) -> dict[tuple[str, str], MeshDescriptor | SwitchDescriptor]:
        """The descriptors of meshes and switches by name; of two with one name the first."""
        kinds: dict[tuple[str, str], MeshDescriptor | SwitchDescriptor] = {}
        for mesh in self.file.mesh_descriptors:
            kinds.setdefault(("mesh", mesh.name), mesh)
        for switch in self.file.switch_descriptors:
            kinds.setdefault(("switch", switch.name), switch)
        return kinds

    def architecture(self) -> str:
        rows: list[MeshDescriptor | SwitchDescriptor] = [*self.file.mesh_descriptors, *self.file.switch_descriptors]
        return rows[0].arch.lower()

    def check_descriptors(self) -> None:
        """Names are unique, shapes fit, and one architecture is used throughout."""
        first: dict[str, Span] = {}
        chip: tuple[str, Span] | None = None
        for key in ("mesh_descriptors", "switch_descriptors"):
            for index, row in enumerate(getattr(self.file, key)):
                path: tuple[Key, ...] = (key, index)
                self.check_name(row.name, (*path, "name"), first)
                span = span_of(self.root, (*path, "arch"))
                if chip and chip[0] != row.arch:
                    message = f"descriptor `{shown(row.name)}` has arch {row.arch}, others have {chip[0]}"
                    labels = (Label(chip[1], "the first one"),)
                    label = Label(span, f"expected {chip[0]}")
                    self.found.append(Diagnostic(codes.MIXED_ARCHITECTURES, message, label, labels))
                chip = chip or (row.arch, span)
                self.found += self.shape_problems(row, path)
        graphs: dict[str, Span] = {}
        for index, graph in enumerate(self.file.graph_descriptors):
            self.check_name(graph.name, ("graph_descriptors", index, "name"), graphs)

    def check_name(self, name: str, path: tuple[Key, ...], first: dict[str, Span]) -> None:
        span = span_of(self.root, path)
        if name in first:
            message = f"descriptor `{shown(name)}` is defined twice"
            labels = (Label(first[name], "first defined here"),)
            self.found.append(Diagnostic(codes.NAME_TWICE, message, Label(span, "and again here"), labels))
        first.setdefault(name, span)

    def shape_problems(self, row: MeshDescriptor | SwitchDescriptor, path: tuple[Key, ...]) -> Iterator[Diagnostic]:
        devices = row.device_topology
        kinds, name = devices.dim_types, shown(row.name)
        if kinds and len(kinds) != len(devices.dims):
            message = f"`{name}` has {len(kinds)} `dim_types` for {len(devices.dims)} `dims`"
            span = span_of(self.root, (*path, "device_topology", "dim_types"))
            yield Diagnostic(codes.DIM_TYPES, message, Label(span, f"expected {len(devices.dims)}"))
        if isinstance(row, MeshDescriptor):
            hosts = row.host_topology.dims
            if any(extent % parts for extent, parts in zip(devices.dims, hosts, strict=True)):
                message = f"`{name}` has {devices.dims} devices, which its {hosts} hosts cannot share evenly"
                here = Label(span_of(self.root, (*path, "host_topology", "dims")), "hosts")
                there = Label(span_of(self.root, (*path, "device_topology", "dims")), "devices")
                self.lost = True
                yield Diagnostic(codes.SHAPES, message, here, (there,))
        if row.express_connections:
            message = f"`{name}` has `express_connections`, which the runtime does not take"
            span = span_of(self.root, (*path, "express_connections"))
            yield Diagnostic(codes.NOT_IN_RUNTIME, message, Label(span), hints=("remove them",))
        for number, link in enumerate(row.express_links):
            if link.dim_idx >= len(devices.dims):
                message = f"`{name}` has express links along dimension {link.dim_idx} of {len(devices.dims)}"
                span = span_of(self.root, (*path, "express_links", number, "dim_idx"))
                yield Diagnostic(codes.DEVICE_NUMBER, message, Label(span, "expected 0 or 1"))

    def graph(self, top: NodeRef) -> tuple[GraphDescriptor, int] | None:
        """The graph that the root names; what is wrong with having it is said on the way."""
        rows = self.file.graph_descriptors
        given = [name for name in ("mesh", "graph", "switch") if getattr(top, name) is not None]
        if len(given) != 1:
            self.one_of(top, ("top_level_instance",))
            return None
        if len(rows) > 1:
            message = f"the descriptor has {len(rows)} graphs; the runtime takes one"
            labels = (Label(span_of(self.root, ("graph_descriptors", 0, "name")), "the first"),)
            label = Label(span_of(self.root, ("graph_descriptors", 1, "name")), "the second")
            self.found.append(Diagnostic(codes.NOT_ONE_FABRIC, message, label, labels))
        if top.graph is None or len(rows) > 1:
            return None
        self.check_top(top.graph.graph_id, "graph_id")
        index = next((i for i, row in enumerate(rows) if row.name == top.graph.graph_descriptor), None)
        if index is None:
            self.unknown("graph", top.graph.graph_descriptor, ("top_level_instance", "graph", "graph_descriptor"))
            return None
        if rows[index].type != _FABRIC:
            message = (
                f'graph `{shown(rows[index].name)}` has type "{shown(rows[index].type)}"; the runtime takes "{_FABRIC}"'
            )
            label = Label(span_of(self.root, ("graph_descriptors", index, "type")), f'expected "{_FABRIC}"')
            self.found.append(Diagnostic(codes.NOT_ONE_FABRIC, message, label))
        return rows[index], index

    def check_top(self, number: int, key: str) -> None:
        if number:
            message = f"the root has `{key}` {number}; 0 was expected"
            path = ("top_level_instance", key.removesuffix("_id"), key)
            self.found.append(Diagnostic(codes.TOP_LEVEL, message, Label(span_of(self.root, path), "expected 0")))

    def one_of(self, node: NodeRef, path: tuple[Key, ...]) -> None:
        given = [name for name in ("mesh", "graph", "switch") if getattr(node, name) is not None]
        what = f"names a {' and a '.join(given)}" if given else "names nothing"
        message = f"a reference {what}; one of `mesh`, `graph` and `switch` was expected"
        self.found.append(Diagnostic(codes.WRONG_VALUE, message, Label(span_of(self.root, path))))

    def instance(self, node: NodeRef, path: tuple[Key, ...]) -> None:
        """Take one mesh or switch into the graph."""
        top = path[0] == "top_level_instance"
        key = instance_key(node)
        if key is None:
            if not top:
                self.one_of(node, path)
            return
        kind, number = key
        if top:
            if kind == "graph":
                return
            self.check_top(number, f"{kind}_id")
        if kind == "graph":
            message = "a graph has a graph as an instance; the runtime takes meshes and switches"
            self.found.append(Diagnostic(codes.NOT_ONE_FABRIC, message, Label(span_of(self.root, (*path, "graph")))))
            return
        name = getattr(getattr(node, kind), f"{kind}_descriptor")
        row = self.kinds.get((kind, name))
        span = self.id_span(path, kind)
        if row is None:
            self.lost = True
            self.unknown(kind, name, (*path, kind, f"{kind}_descriptor"))
            return
        taken = (self.meshes if kind == "mesh" else self.switches).get(number)
        if taken is not None:
            message = f"{kind} {number} is defined twice"
            labels = (Label(taken.span, "first defined here"),)
            self.lost = True
            self.found.append(Diagnostic(codes.MESH_TWICE, message, Label(span, "and again here"), labels))
        elif isinstance(row, MeshDescriptor):
            self.meshes[number] = _mesh(number, row, span)
        elif isinstance(row, SwitchDescriptor):
            self.switches[number] = _switch(number, row, span)

    def id_span(self, path: tuple[Key, ...], kind: str) -> Span:
        written = node_at(self.root, (*path, kind, f"{kind}_id"))
        return written.span if written is not None else span_of(self.root, (*path, kind))

    def unknown(self, kind: str, name: str, path: tuple[Key, ...]) -> None:
        known = [row.name for row in getattr(self.file, f"{kind}_descriptors")]
        meant = closest(name, known)
        hints = (f"did you mean `{shown(meant)}`?",) if meant else ()
        expected = (
            f"expected {listed(shown(other) for other in known)}" if known else f"there is no `{kind}_descriptors`"
        )
        message = f"a reference names {kind} descriptor `{shown(name)}`, which does not exist"
        self.found.append(Diagnostic(codes.REFERENCE, message, Label(span_of(self.root, path), expected), hints=hints))


def _dim_types(row: MeshDescriptor | SwitchDescriptor) -> tuple[str, str]:
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
