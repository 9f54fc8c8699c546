"""Read `rank_bindings.yaml`: which mesh each rank drives, the environment it gets, and which descriptor has the meshes.

Rows are also read one by one, so that a mistake in one row does not hide mistakes in the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ttlaunch.diagnostics.diagnostic import Diagnostic
from ttlaunch.diagnostics.span import Span
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.findings import Findings, first_gap
from ttlaunch.spec.located.nodes import Key, MapNode, Node, ScalarNode, items_of, node_at, plain, span_of
from ttlaunch.spec.located.schema import check_schema
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.model import Binding, MeshId, Rank
from ttlaunch.spec.topology.places import DESCRIPTOR_FILES, DESCRIPTORS, NamedFile
from ttlaunch.spec.topology.schema import BindingRow, BindingsFile, SubContextBindingsFile
from ttlaunch.spec.topology.variables import expand_variables


@dataclass(frozen=True)
class BoundRank:
    """One row: the binding, and the places of its parts.

    Attributes:
        mesh_span: The place of `mesh_id`.
        devices_span: The place of the `TT_VISIBLE_DEVICES` that applies to the rank, its own or the global one.
        descriptor: The descriptor of the rank or of its sub-context; None if the file's descriptor applies.
        subcontext_span: The place of `subcontext_id`, or else of `rank`.
        size: The value of `subcontext_size` and its place; None without this key.
    """

    binding: Binding
    mesh_span: Span
    host_rank_span: Span
    devices_span: Span | None
    descriptor: NamedFile | None
    subcontext_span: Span
    size: tuple[int, Span] | None


@dataclass(frozen=True)
class Bindings:
    """The file as read, before it is checked against other files.

    Attributes:
        rows: The rows that could be read, in the order of the file.
        complete: Whether every row could be read, and no rank is left out.
        span: The place of the word `rank_bindings`.
        descriptor: The file that `mesh_graph_desc_path` names; None without this key.
        descriptors: The descriptor of each sub-context; empty without sub-contexts.
        variable_spans: The places of the values of `global_environment`.
    """

    rows: list[BoundRank]
    complete: bool
    span: Span
    descriptor: NamedFile | None
    descriptors: Mapping[int, NamedFile] = field(default_factory=dict)
    global_environment: dict[str, str] = field(default_factory=dict)
    variable_spans: dict[str, Span] = field(default_factory=dict)


def parse_bindings(root: Node, *, environment: Mapping[str, str]) -> tuple[Bindings, list[Diagnostic]]:
    """Read a bindings file; parts that cannot be read are left out."""
    model = SubContextBindingsFile if node_at(root, (DESCRIPTORS,)) else BindingsFile
    file, found = check_schema(model, root, codes=TOPOLOGY)
    findings = Findings(root, found)
    shared = _global_variables(file, findings, environment)
    rows: list[BoundRank] = []
    descriptors = named_files(root, DESCRIPTORS)
    items = items_of(node_at(root, ("rank_bindings",)))
    for index, item in enumerate(items):
        # A mistake elsewhere in the file leaves no model of the whole; rows are then checked one by one, and `found`
        # has their mistakes already.
        row = file.rank_bindings[index] if file else check_schema(BindingRow, item, codes=TOPOLOGY)[0]
        if row is not None:
            path = ("rank_bindings", index)
            place = (*path, "env_overrides")
            own = expand_variables(row.env_overrides, findings, path=place, environment=environment)
            rows.append(_bound_rank(row, root, path, own=own, shared=shared, descriptors=descriptors))
    is_complete = bool(items) and len(rows) == len(items)
    is_complete = _check_ranks(rows, findings, is_complete=is_complete)
    span = root.keys.get("rank_bindings", root.span) if isinstance(root, MapNode) else root.span
    spans = {name: span_of(root, ("global_env", name)) for name in shared}
    return Bindings(rows, is_complete, span, _descriptor(root, ()), descriptors, shared, spans), found


def named_files(root: Node, key: str) -> dict[int, NamedFile]:
    """Return the files of sub-contexts under this key of the file, by number, as far as they can be read."""
    group = node_at(root, (key,))
    usual = DESCRIPTOR_FILES if key == DESCRIPTORS else ()
    return {
        number: NamedFile(key, node.value, node.span, usual)
        for number, node in (group.entries.items() if isinstance(group, MapNode) else ())
        if isinstance(number, int) and isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value
    }


def _bound_rank(
    row: BindingRow,
    root: Node,
    path: tuple[Key, ...],
    *,
    own: Mapping[str, str],
    shared: Mapping[str, str],
    descriptors: Mapping[int, NamedFile],
) -> BoundRank:
    def span(*keys: str) -> Span:
        return span_of(root, (*path, *keys))

    binding = Binding(
        Rank(row.rank),
        MeshId(row.mesh_id),
        span("rank"),
        mesh_host_rank=row.mesh_host_rank,
        environment=own,
        subcontext_id=row.subcontext_id,
    )
    devices: Span | None = None
    if "TT_VISIBLE_DEVICES" in own:
        devices = span("env_overrides", "TT_VISIBLE_DEVICES")
    elif "TT_VISIBLE_DEVICES" in shared:
        devices = span_of(root, ("global_env", "TT_VISIBLE_DEVICES"))
    number = row.subcontext_id
    return BoundRank(
        binding,
        mesh_span=span("mesh_id"),
        host_rank_span=span("mesh_id" if row.mesh_host_rank is None else "mesh_host_rank"),
        devices_span=devices,
        descriptor=_descriptor(root, path) or (None if number is None else descriptors.get(number)),
        subcontext_span=span("rank" if number is None else "subcontext_id"),
        size=None if row.subcontext_size is None else (row.subcontext_size, span("subcontext_size")),
    )


def _global_variables(file: BindingsFile | None, findings: Findings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of all ranks, also those of a file with mistakes elsewhere."""
    written = file.global_env if file else {}
    group = node_at(findings.root, ("global_env",))
    if not written and isinstance(group, MapNode):
        values = plain(group)
        written = {name: value for name, value in values.items() if isinstance(name, str) and isinstance(value, str)}
    return expand_variables(written, findings, path=("global_env",), environment=environment)


def _descriptor(root: Node, path: tuple[Key, ...]) -> NamedFile | None:
    node = node_at(root, (*path, "mesh_graph_desc_path"))
    if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value:
        return NamedFile("mesh_graph_desc_path", node.value, node.span, DESCRIPTOR_FILES)
    return None


def _check_ranks(rows: list[BoundRank], findings: Findings, *, is_complete: bool) -> bool:
    """Check that ranks are unique and count from 0 without a gap, and return whether all ranks are known."""
    first: dict[int, Span] = {}
    for row in rows:
        rank, span = row.binding.rank, row.binding.span
        if rank in first:
            findings.twice(codes.RANK_TWICE, f"rank {rank} is bound twice", span, first=first[rank], verb="bound")
        first.setdefault(rank, span)
    gap = first_gap(first)
    if gap and is_complete and len(first) == len(rows):
        missing, above = gap
        message = f"ranks have a gap: there is a rank {above} but no rank {missing}"
        findings.add(codes.RANK_GAP, message, first[above], label=f"expected {missing}")
    return is_complete and gap is None
