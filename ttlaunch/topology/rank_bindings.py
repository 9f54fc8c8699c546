"""Read `rank_bindings.yaml`: which mesh each rank drives, the environment it gets, and which descriptor has the meshes.

Rows are also read one by one, so that a mistake in one of them doesn't hide what is wrong with the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.located.codes import TOPOLOGY
from ttlaunch.located.nodes import ListNode, MapNode, Node, ScalarNode, node_at, plain, span_of
from ttlaunch.located.schema import check_schema
from ttlaunch.located.yaml import parse_yaml
from ttlaunch.topology import codes
from ttlaunch.topology.model import Binding, MeshId, Rank
from ttlaunch.topology.schema import BindingRow, BindingsFile
from ttlaunch.topology.variables import expand_variables

_SUB_CONTEXT_FILE = ("subcontext_id_to_rank_bindings", "subcontext_id_to_mesh_graph_descriptor")
_SUB_CONTEXT_ROW = ("subcontext_id", "subcontext_size", "mesh_graph_desc_path")


@dataclass(frozen=True)
class BoundRank:
    """One row: the binding, and where its parts stand.

    Attributes:
        mesh_span: The value of `mesh_id`.
        devices_span: The value of `TT_VISIBLE_DEVICES` that counts for this rank, its own or the global one.
    """

    binding: Binding
    mesh_span: Span
    host_rank_span: Span
    devices_span: Span | None


@dataclass(frozen=True)
class Bindings:
    """The file as read, before it is checked against other files.

    Attributes:
        rows: Those that could be read, in the order of the file.
        complete: Whether all of them could.
        span: The word `rank_bindings`.
        descriptor: `mesh_graph_desc_path` as written, with its place; None if it is missing.
    """

    rows: list[BoundRank]
    complete: bool
    span: Span
    descriptor: tuple[str, Span] | None
    global_environment: dict[str, str] = field(default_factory=dict)


def parse_bindings(source: Source, *, environment: Mapping[str, str]) -> tuple[Bindings | None, list[Diagnostic]]:
    """Read the text of a bindings file; None if there is nothing in it to check other files against."""
    root, found = parse_yaml(source, codes=TOPOLOGY)
    if root is None:
        return None, found
    sub_context = _sub_context(root)
    if sub_context:
        return None, [*found, sub_context]
    file, mistakes = check_schema(BindingsFile, root, codes=TOPOLOGY)
    found += mistakes
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
    return Bindings(rows, complete, span, _descriptor(root), shared), found


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
    )
    devices: Span | None = None
    if "TT_VISIBLE_DEVICES" in own:
        devices = span_of(root, (*path, "env_overrides", "TT_VISIBLE_DEVICES"))
    elif "TT_VISIBLE_DEVICES" in shared:
        devices = span_of(root, ("global_env", "TT_VISIBLE_DEVICES"))
    mesh_span = span_of(root, (*path, "mesh_id"))
    host_rank_span = span_of(root, (*path, "mesh_host_rank")) if row.mesh_host_rank is not None else mesh_span
    return BoundRank(binding, mesh_span, host_rank_span, devices), found


def _variables(
    root: Node, key: str, written: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[Diagnostic]]:
    if not written:
        group = node_at(root, (key,))
        values = plain(group) if isinstance(group, MapNode) else {}
        written = {name: value for name, value in values.items() if isinstance(name, str) and isinstance(value, str)}
    return expand_variables(written, root=root, path=(key,), environment=environment)


def _descriptor(root: Node) -> tuple[str, Span] | None:
    node = node_at(root, ("mesh_graph_desc_path",))
    if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value:
        return node.value, node.span
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


def _sub_context(root: Node) -> Diagnostic | None:
    """Sub-contexts run several of these files side by side; nothing here reads them yet."""
    groups: list[tuple[Node, tuple[str, ...]]] = [(root, _SUB_CONTEXT_FILE)]
    rows = node_at(root, ("rank_bindings",))
    groups += [(row, _SUB_CONTEXT_ROW) for row in (rows.items if isinstance(rows, ListNode) else ())]
    for group, keys in groups:
        for key in keys:
            if isinstance(group, MapNode) and key in group.keys:
                span = group.keys[key]
                message = f"{span.source.name} uses sub-contexts (`{key}`), which are not read yet"
                hint = "start one run per sub-context, each with a bindings file of its own"
                return Diagnostic(codes.NOT_READ_YET, message, Label(span), hints=(hint,))
    return None
