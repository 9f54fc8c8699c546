"""Read the connections of a graph of version 2: written one by one, or by a rule (all to all, a ring).

Connections of devices that join the same two meshes become one link whose channels add up.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.findings import Findings
from ttlaunch.spec.located.nodes import Key, MapNode, node_at, span_of
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.links import Edge, End, check_device, join_edges, link_to_itself, missing_end
from ttlaunch.spec.topology.mgd_schema import Connection, GraphDescriptor, NodeRef
from ttlaunch.spec.topology.model import Link, Mesh, Switch, SwitchLink

KINDS = ("mesh", "graph", "switch")
"""The kinds of things that a reference can name; its fields have the same names."""

_NUM_ENDS = 2


def given_kinds(node: NodeRef) -> list[str]:
    """Return the kinds of things that a reference names; a correct one names exactly one."""
    return [kind for kind in KINDS if getattr(node, kind) is not None]


def instance_key(node: NodeRef) -> tuple[str, int] | None:
    """Return kind and number of what a reference names; None unless it names exactly one thing."""
    given = given_kinds(node)
    return (given[0], getattr(getattr(node, given[0]), f"{given[0]}_id")) if len(given) == 1 else None


def id_span(root: MapNode, path: tuple[Key, ...], kind: str) -> Span:
    """Return the place of a reference's number, or of the reference if it has no number."""
    written = node_at(root, (*path, kind, f"{kind}_id"))
    return written.span if written is not None else span_of(root, (*path, kind))


@dataclass
class Connections:
    """The connections of one graph.

    Attributes:
        edges: Those that could be read.
        missing: Ids of meshes and switches that connections name and that do not exist.
    """

    findings: Findings
    root: MapNode
    meshes: dict[int, Mesh]
    switches: dict[int, Switch]
    edges: list[Edge] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)

    def read(self, graph: GraphDescriptor, index: int) -> None:
        """Read the connections of the graph at this place of the file."""
        path: tuple[Key, ...] = ("graph_descriptors", index)
        if graph.graph_topology is not None and graph.connections:
            keys = node_at(self.root, path)
            spans = keys.keys if isinstance(keys, MapNode) else {}
            message = "the graph has both `graph_topology` and `connections`; one of them was expected"
            other = (spans.get("graph_topology", self.root.span), "the other is here")
            self.findings.add(codes.TWO_GRAPHS, message, spans.get("connections", self.root.span), other=other)
            return
        if graph.graph_topology is not None:
            self.edges += self.by_rule(graph, span_of(self.root, (*path, "graph_topology")))
        first: dict[object, Span] = {}
        policy: tuple[str, Span] | None = None
        for number, row in enumerate(graph.connections):
            here: tuple[Key, ...] = (*path, "connections", number)
            edge = self.edge(row, here)
            if edge is None:
                continue
            policy_span = span_of(self.root, (*here, "channels", "policy"))
            if policy and policy[0] != edge.policy:
                message = f"a connection is {edge.policy}, the first one of its graph {policy[0]}"
                self.findings.add(codes.MIXED_POLICIES, message, policy_span, other=(policy[1], f"{policy[0]} here"))
            policy = policy or (edge.policy, policy_span)
            if edge.key in first:
                message = f"the link between {edge.low} and {edge.high} is given twice"
                self.findings.twice(codes.LINK_TWICE, message, edge.span, first=first[edge.key])
                continue
            first[edge.key] = edge.span
            self.edges.append(edge)

    def by_rule(self, graph: GraphDescriptor, span: Span) -> Iterator[Edge]:
        """Yield the connections that `graph_topology` stands for."""
        topology = graph.graph_topology
        keys = [key for node in graph.instances if (key := instance_key(node)) and self.named(*key)]
        ends = [End(kind, number, None, span) for kind, number in dict.fromkeys(keys)]
        if topology is None or len(ends) < _NUM_ENDS:
            return
        # Two instances are joined by one link, not by one each way around the ring.
        ring = list(zip(ends, ends[1:] + (ends[:1] if len(ends) > _NUM_ENDS else []), strict=False))
        channels, uses_z = topology.channels, topology.assign_z_direction
        for pair in combinations(ends, 2) if topology.layout_type == "ALL_TO_ALL" else ring:
            yield Edge(pair, channels.count, span, policy=channels.policy, uses_z=uses_z)

    def named(self, kind: str, number: int) -> Mesh | Switch | None:
        """Return the mesh or switch with this number; None if there is none."""
        return self.meshes.get(number) if kind == "mesh" else self.switches.get(number) if kind == "switch" else None

    def edge(self, row: Connection, path: tuple[Key, ...]) -> Edge | None:
        """Read one connection; None if its ends are not known."""
        connection = node_at(self.root, path)
        if len(row.nodes) != _NUM_ENDS:
            message = f"a connection has {len(row.nodes)} `nodes`; 2 were expected"
            span = connection.span if connection is not None else self.root.span
            self.findings.add(codes.TWO_NODES, message, span, label="expected two `nodes { … }`")
            return None
        if row.directional:
            message, expected = (
                "a connection is `directional`, which the runtime does not take",
                "expected `false`, or nothing",
            )
            self.findings.add(codes.NOT_IN_RUNTIME, message, (*path, "directional"), label=expected)
        a, b = (self.end(node, (*path, "nodes", number)) for number, node in enumerate(row.nodes))
        if a is None or b is None:
            return None
        if (a.kind, a.number) == (b.kind, b.number):
            self.findings.found.append(link_to_itself(b))
            return None
        span = max(a, b, key=lambda end: end.key).span
        return Edge((a, b), row.channels.count, span, policy=row.channels.policy, uses_z=row.assign_z_direction)

    def end(self, node: NodeRef, path: tuple[Key, ...]) -> End | None:
        """Read one end of a connection; None if it is no mesh, switch or device that exists."""
        kind, number = instance_key(node) or ("graph", 0)
        if kind == "graph":
            message = "an end of a connection is not one mesh or one switch"
            self.findings.add(codes.WRONG_VALUE, message, path, label="expected `mesh { … }` or `switch { … }`")
            return None
        ref, there = getattr(node, kind), self.named(kind, number)
        end = End(kind, number, ref.device_id, id_span(self.root, path, kind))
        if there is None:
            self.missing.add(number)
            self.findings.found.append(missing_end(kind, number, end.span))
            return None
        name, own = getattr(ref, f"{kind}_descriptor"), there.board if isinstance(there, Mesh) else there.name
        if name != own:
            message = f"a link calls {kind} {number} `{shown(name)}`, but it is made of `{shown(own)}`"
            place, expected = (*path, kind, f"{kind}_descriptor"), f"expected `{shown(own)}`"
            self.findings.add(codes.REFERENCE, message, place, label=expected, other=(there.span, "defined here"))
        mistake = check_device(end, there, span=span_of(self.root, (*path, kind, "device_id")))
        self.findings.found += [mistake] if mistake else []
        return None if mistake else end

    def links(self) -> list[Link]:
        """Return the links between meshes."""
        return join_edges(edge for edge in self.edges if edge.low.kind == edge.high.kind == "mesh")

    def switch_links(self) -> list[SwitchLink]:
        """Return the links that join a switch to a mesh or to another switch."""
        found = []
        for edge in self.edges:
            low, high = edge.low, edge.high
            if low.kind == high.kind == "mesh":
                continue
            switch, other = (high, low) if high.kind == "switch" else (low, high)
            link = SwitchLink(
                switch=switch.number,
                other=other.number,
                other_is_switch=other.kind == "switch",
                channels=edge.channels,
                span=edge.span,
                devices=(switch.device, other.device),
                policy=edge.policy,
            )
            found.append(link)
        return found
