"""Read the connections of a graph of version 2: written one by one, or by a rule (all to all, a ring).

Connections of devices that join the same two meshes become one link whose channels add up.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.nodes import Key, MapNode, node_at, span_of
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.mgd_schema import Connection, GraphDescriptor, NodeRef
from ttlaunch.spec.topology.model import Link, Mesh, MeshId, Switch, SwitchLink

_NUM_ENDS = 2


@dataclass(frozen=True)
class _End:
    """One end of a connection."""

    kind: str
    number: int
    device: int | None
    span: Span

    @property
    def key(self) -> tuple[str, int, int]:
        return self.kind, self.number, -1 if self.device is None else self.device

    def __str__(self) -> str:
        name = f"{self.kind} {self.number}"
        return name if self.device is None else f"device {self.device} of {name}"


@dataclass(frozen=True)
class _Edge:
    low: _End
    high: _End
    channels: int
    policy: str
    uses_z: bool
    span: Span


def instance_key(node: NodeRef) -> tuple[str, int] | None:
    """What a reference names: its kind and number; None unless it names exactly one thing."""
    given: list[tuple[str, int]] = []
    if node.mesh is not None:
        given.append(("mesh", node.mesh.mesh_id))
    if node.graph is not None:
        given.append(("graph", node.graph.graph_id))
    if node.switch is not None:
        given.append(("switch", node.switch.switch_id))
    return given[0] if len(given) == 1 else None


@dataclass
class Connections:
    """The connections of one graph, and what is wrong with them."""

    root: MapNode
    meshes: dict[int, Mesh]
    switches: dict[int, Switch]
    found: list[Diagnostic] = field(default_factory=list)
    switch_links: list[SwitchLink] = field(default_factory=list)
    edges: list[_Edge] = field(default_factory=list)

    def read(self, graph: GraphDescriptor, index: int) -> None:
        path: tuple[Key, ...] = ("graph_descriptors", index)
        if graph.graph_topology is not None and graph.connections:
            keys = node_at(self.root, path)
            spans = keys.keys if isinstance(keys, MapNode) else {}
            message = "the graph has both `graph_topology` and `connections`; one of them was expected"
            labels = (Label(spans.get("graph_topology", self.root.span), "the other is here"),)
            label = Label(spans.get("connections", self.root.span))
            self.found.append(Diagnostic(codes.TWO_GRAPHS, message, label, labels))
            return
        if graph.graph_topology is not None:
            self.edges += self.by_rule(graph, span_of(self.root, (*path, "graph_topology")))
        first: dict[tuple[tuple[str, int, int], tuple[str, int, int]], Span] = {}
        policy: tuple[str, Span] | None = None
        for number, row in enumerate(graph.connections):
            here: tuple[Key, ...] = (*path, "connections", number)
            edge = self.edge(row, here)
            if edge is None:
                continue
            if policy and policy[0] != edge.policy:
                message = f"a connection is {edge.policy}, the first one of its graph {policy[0]}"
                labels = (Label(policy[1], f"{policy[0]} here"),)
                self.found.append(Diagnostic(codes.MIXED_POLICIES, message, Label(self.policy_span(here)), labels))
            policy = policy or (edge.policy, self.policy_span(here))
            pair = (edge.low.key, edge.high.key)
            if pair in first:
                message = f"the link between {edge.low} and {edge.high} is given twice"
                labels = (Label(first[pair], "first given here"),)
                self.found.append(Diagnostic(codes.LINK_TWICE, message, Label(edge.span, "and again here"), labels))
                continue
            first[pair] = edge.span
            self.edges.append(edge)

    def policy_span(self, path: tuple[Key, ...]) -> Span:
        return span_of(self.root, (*path, "channels", "policy"))

    def by_rule(self, graph: GraphDescriptor, span: Span) -> Iterator[_Edge]:
        topology = graph.graph_topology
        keys = [key for node in graph.instances if (key := instance_key(node)) and self.exists(*key)]
        ends = [_End(kind, number, None, span) for kind, number in dict.fromkeys(keys)]
        if topology is None or len(ends) < _NUM_ENDS:
            return
        ring = list(zip(ends, ends[1:] + (ends[:1] if len(ends) > _NUM_ENDS else []), strict=False))
        for pair in combinations(ends, 2) if topology.layout_type == "ALL_TO_ALL" else ring:
            low, high = sorted(pair, key=lambda end: end.key)
            channels = topology.channels
            yield _Edge(low, high, channels.count, channels.policy, topology.assign_z_direction, span)

    def exists(self, kind: str, number: int) -> bool:
        return number in (self.meshes if kind == "mesh" else self.switches if kind == "switch" else {})

    def edge(self, row: Connection, path: tuple[Key, ...]) -> _Edge | None:
        connection = node_at(self.root, path)
        span = connection.span if connection is not None else self.root.span
        if len(row.nodes) != _NUM_ENDS:
            message = f"a connection has {len(row.nodes)} `nodes`; 2 were expected"
            self.found.append(Diagnostic(codes.TWO_NODES, message, Label(span, "expected two `nodes { … }`")))
            return None
        if row.directional:
            message = "a connection is `directional`, which the runtime does not take"
            label = Label(span_of(self.root, (*path, "directional")), "expected `false`, or nothing")
            self.found.append(Diagnostic(codes.NOT_IN_RUNTIME, message, label))
        ends = [self.end(node, (*path, "nodes", number)) for number, node in enumerate(row.nodes)]
        low, high = ends
        if low is None or high is None:
            return None
        if (low.kind, low.number) == (high.kind, high.number):
            message = f"a link connects {low.kind} {low.number} to itself"
            label = Label(high.span, f"expected another {high.kind}")
            self.found.append(Diagnostic(codes.LINK_TO_ITSELF, message, label))
            return None
        low, high = sorted((low, high), key=lambda end: end.key)
        return _Edge(low, high, row.channels.count, row.channels.policy, row.assign_z_direction, high.span)

    def end(self, node: NodeRef, path: tuple[Key, ...]) -> _End | None:
        key = instance_key(node)
        kind, number = key or ("", 0)
        if key is None or kind == "graph":
            message = "an end of a connection is not one mesh or one switch"
            label = Label(span_of(self.root, path), "expected `mesh { … }` or `switch { … }`")
            self.found.append(Diagnostic(codes.WRONG_VALUE, message, label))
            return None
        ref = node.mesh if kind == "mesh" else node.switch
        written = node_at(self.root, (*path, kind, f"{kind}_id"))
        span = written.span if written is not None else span_of(self.root, (*path, kind))
        there: Mesh | Switch | None = self.meshes.get(number) if kind == "mesh" else self.switches.get(number)
        if there is None:
            message = f"a link names {kind} {number}, which does not exist"
            self.found.append(Diagnostic(codes.LINK_TO_NOWHERE, message, Label(span, f"no {kind} has id {number}")))
            return None
        name, own = getattr(ref, f"{kind}_descriptor"), there.board if isinstance(there, Mesh) else there.name
        if name != own:
            message = f"a link calls {kind} {number} `{shown(name)}`, but it is made of `{shown(own)}`"
            place = Label(span_of(self.root, (*path, kind, f"{kind}_descriptor")), f"expected `{shown(own)}`")
            self.found.append(Diagnostic(codes.REFERENCE, message, place, (Label(there.span, "defined here"),)))
        device, count = ref.device_id if ref else None, there.device_shape[0] * there.device_shape[1]
        if device is not None and device >= count:
            message = f"a link names device {device} of {kind} {number}, which has {count} devices"
            label = Label(span_of(self.root, (*path, kind, "device_id")), f"expected 0 to {count - 1}")
            self.found.append(Diagnostic(codes.DEVICE_NUMBER, message, label))
            return None
        return _End(kind, number, device, span)

    def links(self) -> list[Link]:
        """The links between meshes; those of switches go to `switch_links`."""
        joined: dict[tuple[int, int], list[_Edge]] = {}
        for edge in self.edges:
            if edge.low.kind == edge.high.kind == "mesh":
                joined.setdefault((edge.low.number, edge.high.number), []).append(edge)
            else:
                switch, other = (edge.high, edge.low) if edge.high.kind == "switch" else (edge.low, edge.high)
                devices = (switch.device, other.device)
                link = SwitchLink(
                    switch.number, other.number, other.kind == "switch", edge.channels, edge.span, devices, edge.policy
                )
                self.switch_links.append(link)
        return [_link(low, high, edges) for (low, high), edges in joined.items()]


def _link(low: int, high: int, edges: list[_Edge]) -> Link:
    devices = [
        (edge.low.device, edge.high.device, edge.channels)
        for edge in edges
        if edge.low.device is not None and edge.high.device is not None
    ]
    return Link(
        MeshId(low),
        MeshId(high),
        sum(edge.channels for edge in edges),
        edges[0].span,
        tuple(sorted(devices)) if len(devices) == len(edges) else (),
        edges[0].policy,
        any(edge.uses_z for edge in edges),
    )
