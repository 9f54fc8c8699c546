"""Read the links of a mesh graph: `[M0, M1, 2]` between meshes, or `[[M0, D1], [M1, D1], 1]` between devices.

The last value of a link counts ethernet channels.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from ttlaunch.diagnostics.diagnostic import Diagnostic, given_twice, mistake_at
from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.nodes import ListNode, MapNode, Node, ScalarNode, items_of
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.links import Edge, End, check_device, join_edges, link_to_itself, missing_end
from ttlaunch.spec.topology.model import Link, Mesh, MeshId

_MESH = re.compile(r"[Mm]([0-9]{1,9})\Z")
_DEVICE = re.compile(r"[Dd]([0-9]{1,9})\Z")
_RELAXED_FORM = "`[M0, M1, 2]`"
_STRICT_FORM = "`[[M0, D1], [M1, D1], 1]`"


def parse_links(
    root: MapNode, meshes: Mapping[MeshId, Mesh], *, missing: set[int]
) -> tuple[list[Link], list[Diagnostic]]:
    """Read `RelaxedGraph` or `Graph`, whichever the descriptor has; the vendor's parser wants one of them, even if it is empty.

    Ids of meshes that links name and that do not exist are added to `missing`.
    """
    relaxed, strict = items_of(root.entries.get("RelaxedGraph")), items_of(root.entries.get("Graph"))
    if "RelaxedGraph" in root.keys and "Graph" in root.keys:
        message = "the descriptor has both `RelaxedGraph` and `Graph`; one of them was expected"
        first = (root.keys["RelaxedGraph"], "the other is here")
        empty = " or ".join(f"`{key}`" for key, rows in (("RelaxedGraph", relaxed), ("Graph", strict)) if not rows)
        hint = f"remove {empty}, which has no links" if empty else ""
        return [], [mistake_at(codes.TWO_GRAPHS, message, root.keys["Graph"], other=first, hint=hint)]
    if "RelaxedGraph" not in root.keys and "Graph" not in root.keys:
        message = "the descriptor has neither `RelaxedGraph` nor `Graph`; one of them was expected"
        hint = "write `RelaxedGraph: []` if no links join the meshes"
        return [], [mistake_at(TOPOLOGY.missing_key, message, root.span, label="has no links", hint=hint)]
    edges: list[Edge] = []
    first_at: dict[object, Span] = {}
    found: list[Diagnostic] = []
    for row in relaxed or strict:
        edge = _parse_link(row, has_devices=not relaxed)
        if isinstance(edge, Diagnostic):
            found.append(edge)
            continue
        mistakes = _check_edge(edge, meshes)
        missing.update(end.number for end in edge.ends if MeshId(end.number) not in meshes)
        if not mistakes and edge.key in first_at:
            message = f"the link between {edge.low} and {edge.high} is given twice"
            mistakes = [given_twice(codes.LINK_TWICE, message, row.span, first=first_at[edge.key])]
        first_at.setdefault(edge.key, row.span)
        found += mistakes
        edges += [] if mistakes else [edge]
    return join_edges(edges), found


def _parse_link(row: Node, *, has_devices: bool) -> Edge | Diagnostic:
    form = _STRICT_FORM if has_devices else _RELAXED_FORM
    if not isinstance(row, ListNode) or len(row.items) != 3:  # noqa: PLR2004 - two ends and a number
        many = f"a list of {len(row.items)}" if isinstance(row, ListNode) else "no list"
        return _wrong(row.span, f"a link is {many}; {form} was expected", f"expected {form}")
    ends = []
    for item in row.items[:2]:
        end = _parse_end(item, form) if has_devices else _parse_mesh(item, item.span, form)
        if isinstance(end, Diagnostic):
            return end
        ends.append(end)
    channels = row.items[2]
    value = channels.value if isinstance(channels, ScalarNode) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        written = shown(channels.written) if isinstance(channels, ScalarNode) else "a list"
        message = f"a link has `{written}` channels; at least 1 was expected"
        return _wrong(channels.span, message, "expected at least 1")
    return Edge((ends[0], ends[1]), value, row.span, policy="STRICT" if has_devices else "RELAXED")


def _parse_end(node: Node, form: str) -> End | Diagnostic:
    if not isinstance(node, ListNode) or len(node.items) != 2:  # noqa: PLR2004 - a mesh and a device
        message = f"an end of a link in `Graph` is not a mesh and a device; {form} was expected"
        return _wrong(node.span, message, f"expected {form}")
    mesh = _parse_mesh(node.items[0], node.span, form)
    device = _number(node.items[1], _DEVICE)
    if isinstance(mesh, Diagnostic):
        return mesh
    if device is None:
        return _wrong_word(node.items[1], "a device such as `D1`", form)
    return replace(mesh, device=device)


def _parse_mesh(node: Node, span: Span, form: str) -> End | Diagnostic:
    mesh = _number(node, _MESH)
    return _wrong_word(node, "a mesh such as `M0`", form) if mesh is None else End("mesh", mesh, None, span)


def _number(node: Node, pattern: re.Pattern[str]) -> int | None:
    match = pattern.match(node.value) if isinstance(node, ScalarNode) and isinstance(node.value, str) else None
    return int(match[1]) if match else None


def _check_edge(edge: Edge, meshes: Mapping[MeshId, Mesh]) -> list[Diagnostic]:
    found = []
    for end in edge.ends:
        mesh = meshes.get(MeshId(end.number))
        mistake = check_device(end, mesh, letter="D") if mesh else missing_end("mesh", end.number, end.span)
        found += [mistake] if mistake else []
    if not found and edge.ends[0].number == edge.ends[1].number:
        found.append(link_to_itself(edge.ends[1]))
    return found


def _wrong_word(node: Node, expected: str, form: str) -> Diagnostic:
    written = f"`{shown(node.written)}`" if isinstance(node, ScalarNode) else "a list"
    return _wrong(node.span, f"a link names {written}; {expected} was expected", f"expected {expected}, as in {form}")


def _wrong(span: Span, message: str, label: str) -> Diagnostic:
    return mistake_at(TOPOLOGY.wrong_value, message, span, label=label)
