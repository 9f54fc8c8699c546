"""Read `rank_bindings.yaml`: which mesh each rank drives, the environment it gets, and which descriptor has the meshes.

Rows are also read one by one, so that a mistake in one of them doesn't hide what is wrong with the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Span
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.nodes import Key, ListNode, MapNode, Node, ScalarNode, node_at, plain, span_of
from ttlaunch.spec.located.schema import check_schema
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.model import Binding, MeshId, Rank
from ttlaunch.spec.topology.places import DESCRIPTOR_FILES, NamedFile
from ttlaunch.spec.topology.schema import BindingRow, BindingsFile, SubContextBindingsFile
from ttlaunch.spec.topology.variables import expand_variables

DESCRIPTORS = "subcontext_id_to_mesh_graph_descriptor"


@dataclass(frozen=True)
class BoundRank:
    """One row: the binding, and where its parts stand.

    Attributes:
        mesh_span: The value of `mesh_id`.
        devices_span: The value of `TT_VISIBLE_DEVICES` that counts for this rank, its own or the global one.
        descriptor: Its own, or that of its sub-context; None where the file's counts.
        subcontext_span: The value of `subcontext_id`, else of `rank`.
        size: The value of `subcontext_size` and its place, if it is there.
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
        rows: Those that could be read, in the order of the file.
        complete: Whether all of them could.
        span: The word `rank_bindings`.
        descriptor: `mesh_graph_desc_path`; None if it is missing.
        descriptors: Of each sub-context, if the file has them.
        variable_spans: Where the values of `global_environment` stand.
    """

    rows: list[BoundRank]
    complete: bool
    span: Span
    descriptor: NamedFile | None
    descriptors: Mapping[int, NamedFile] = field(default_factory=dict)
    global_environment: dict[str, str] = field(default_factory=dict)
    variable_spans: dict[str, Span] = field(default_factory=dict)


def parse_bindings(root: Node, *, environment: Mapping[str, str]) -> tuple[Bindings, list[Diagnostic]]:
    """Read a bindings file; what cannot be read of it is left out."""
    model = SubContextBindingsFile if node_at(root, (DESCRIPTORS,)) else BindingsFile
    file, found = check_schema(model, root, codes=TOPOLOGY)
    shared, mistakes = _variables(root, "global_env", file.global_env if file else {}, environment)
    found += mistakes
    rows: list[BoundRank] = []
    written = node_at(root, ("rank_bindings",))
    items = written.items if isinstance(written, ListNode) else ()
    for index, item in enumerate(items):
        row = file.rank_bindings[index] if file else check_schema(BindingRow, item, codes=TOPOLOGY)[0]
        if row is not None:
            bound, mistakes = _bound_rank(row, root, index, shared, environment)
            rows.append(bound)
            found += mistakes
    complete = bool(items) and len(rows) == len(items)
    found += _check_ranks(rows, complete=complete)
    span = root.keys.get("rank_bindings", root.span) if isinstance(root, MapNode) else root.span
    descriptors = named_files(root, DESCRIPTORS)
    rows = [_of_sub_context(row, descriptors) for row in rows]
    spans = {name: span_of(root, ("global_env", name)) for name in shared}
    return Bindings(rows, complete, span, _descriptor(root, ()), descriptors, shared, spans), found


def named_files(root: Node, key: str) -> dict[int, NamedFile]:
    """The files of sub-contexts under this key of the file, by number, as far as they can be read."""
    group = node_at(root, (key,))
    usual = DESCRIPTOR_FILES if key == DESCRIPTORS else ()
    return {
        number: NamedFile(key, node.value, node.span, usual)
        for number, node in (group.entries.items() if isinstance(group, MapNode) else ())
        if isinstance(number, int) and isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value
    }


def _bound_rank(
    row: BindingRow, root: Node, index: int, shared: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[BoundRank, list[Diagnostic]]:
    path = ("rank_bindings", index)
    own, found = expand_variables(row.env_overrides, root=root, path=(*path, "env_overrides"), environment=environment)
    binding = Binding(
        Rank(row.rank),
        MeshId(row.mesh_id),
        span_of(root, (*path, "rank")),
        mesh_host_rank=row.mesh_host_rank,
        environment=own,
        subcontext_id=row.subcontext_id,
    )
    devices: Span | None = None
    if "TT_VISIBLE_DEVICES" in own:
        devices = span_of(root, (*path, "env_overrides", "TT_VISIBLE_DEVICES"))
    elif "TT_VISIBLE_DEVICES" in shared:
        devices = span_of(root, ("global_env", "TT_VISIBLE_DEVICES"))
    mesh_span = span_of(root, (*path, "mesh_id"))
    host_rank_span = span_of(root, (*path, "mesh_host_rank")) if row.mesh_host_rank is not None else mesh_span
    size = None if row.subcontext_size is None else (row.subcontext_size, span_of(root, (*path, "subcontext_size")))
    subcontext_span = binding.span if row.subcontext_id is None else span_of(root, (*path, "subcontext_id"))
    descriptor = _descriptor(root, path)
    return BoundRank(binding, mesh_span, host_rank_span, devices, descriptor, subcontext_span, size), found


def _of_sub_context(row: BoundRank, descriptors: Mapping[int, NamedFile]) -> BoundRank:
    number = row.binding.subcontext_id
    given = None if number is None else descriptors.get(number)
    return row if row.descriptor or given is None else replace(row, descriptor=given)


def _variables(
    root: Node, key: str, written: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[Diagnostic]]:
    if not written:
        group = node_at(root, (key,))
        values = plain(group) if isinstance(group, MapNode) else {}
        written = {name: value for name, value in values.items() if isinstance(name, str) and isinstance(value, str)}
    return expand_variables(written, root=root, path=(key,), environment=environment)


def _descriptor(root: Node, path: tuple[Key, ...]) -> NamedFile | None:
    node = node_at(root, (*path, "mesh_graph_desc_path"))
    if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value:
        return NamedFile("mesh_graph_desc_path", node.value, node.span, DESCRIPTOR_FILES)
    return None


def _check_ranks(rows: list[BoundRank], *, complete: bool) -> list[Diagnostic]:
    """Ranks are unique and count from 0 without a gap."""
    found: list[Diagnostic] = []
    first: dict[int, Span] = {}
    for row in rows:
        rank, span = row.binding.rank, row.binding.span
        if rank in first:
            labels = (Label(first[rank], "first bound here"),)
            message = f"rank {rank} is bound twice"
            found.append(Diagnostic(codes.RANK_TWICE, message, Label(span, "and again here"), labels))
        else:
            first[rank] = span
    missing = next((rank for rank in range(len(first)) if rank not in first), None)
    if missing is not None and complete and not found:
        above = min(rank for rank in first if rank > missing)
        message = f"ranks have a gap: there is a rank {above} but no rank {missing}"
        found.append(Diagnostic(codes.RANK_GAP, message, Label(first[above], f"expected {missing}")))
    return found
