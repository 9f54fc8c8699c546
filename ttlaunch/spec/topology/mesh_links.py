"""Read the links of a mesh graph: `[M0, M1, 2]` between meshes, or `[[M0, D1], [M1, D1], 1]` between devices.

Links are undirected; their last value counts ethernet channels. Links of devices that join the same two meshes become
one link whose channels add up.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.nodes import ListNode, MapNode, Node, ScalarNode
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.model import Link, Mesh, MeshId

_MESH = re.compile(r"[Mm]([0-9]{1,9})\Z")
_DEVICE = re.compile(r"[Dd]([0-9]{1,9})\Z")
_RELAXED_FORM = "`[M0, M1, 2]`"
_STRICT_FORM = "`[[M0, D1], [M1, D1], 1]`"


@dataclass(frozen=True)
class _End:
    """One end of a link: a mesh, and a device of it in a graph of devices."""

    mesh: int
    device: int | None
    span: Span

    @property
    def key(self) -> tuple[int, int]:
        return self.mesh, -1 if self.device is None else self.device

    def __str__(self) -> str:
        return f"M{self.mesh}" if self.device is None else f"M{self.mesh} D{self.device}"


def parse_links(root: MapNode, meshes: Mapping[MeshId, Mesh]) -> tuple[list[Link], list[Diagnostic]]:
    """Read `RelaxedGraph` or `Graph`, whichever the descriptor has."""
    relaxed, strict = root.entries.get("RelaxedGraph"), root.entries.get("Graph")
    if _rows(relaxed) and _rows(strict):
        message = "the descriptor has links in both `RelaxedGraph` and `Graph`; one of them was expected"
        first = Label(root.keys["RelaxedGraph"], "the other is here")
        return [], [Diagnostic(codes.TWO_GRAPHS, message, Label(root.keys["Graph"]), (first,))]
    links: dict[tuple[tuple[int, int], tuple[int, int]], Span] = {}
    joined: dict[tuple[int, int], list[tuple[_End, _End, int, Span]]] = {}
    found: list[Diagnostic] = []
    for row in _rows(relaxed) or _rows(strict):
        link = _parse_link(row, devices=not _rows(relaxed))
        if isinstance(link, Diagnostic):
            found.append(link)
            continue
        ends, channels = link
        mistakes = _check_ends(ends, meshes)
        low, high = sorted(ends, key=lambda end: end.key)
        pair = (low.key, high.key)
        if not mistakes and pair in links:
            message = f"the link between {low} and {high} is given twice"
            mistakes = [
                Diagnostic(
                    codes.LINK_TWICE,
                    message,
                    Label(row.span, "and again here"),
                    (Label(links[pair], "first given here"),),
                )
            ]
        links.setdefault(pair, row.span)
        found += mistakes
        if not mistakes:
            key = (low.mesh, high.mesh)
            joined.setdefault(key, []).append((low, high, channels, row.span))
    return [_joined(key, rows) for key, rows in joined.items()], found


def _joined(key: tuple[int, int], rows: list[tuple[_End, _End, int, Span]]) -> Link:
    """The link of two meshes that their links of devices make."""
    devices = [(a.device, b.device, count) for a, b, count, _ in rows if a.device is not None and b.device is not None]
    channels, policy = sum(count for _, _, count, _ in rows), "STRICT" if devices else "RELAXED"
    return Link(MeshId(key[0]), MeshId(key[1]), channels, rows[0][3], tuple(sorted(devices)), policy)


def _parse_link(row: Node, *, devices: bool) -> tuple[tuple[_End, _End], int] | Diagnostic:
    form = _STRICT_FORM if devices else _RELAXED_FORM
    if not isinstance(row, ListNode) or len(row.items) != 3:  # noqa: PLR2004 - two ends and a number
        many = f"a list of {len(row.items)}" if isinstance(row, ListNode) else "no list"
        return _wrong(row.span, f"a link is {many}; {form} was expected", f"expected {form}")
    ends = []
    for item in row.items[:2]:
        end = _parse_end(item, form) if devices else _parse_mesh(item, item.span, form)
        if isinstance(end, Diagnostic):
            return end
        ends.append(end)
    channels = row.items[2]
    value = channels.value if isinstance(channels, ScalarNode) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        written = shown(channels.written) if isinstance(channels, ScalarNode) else "a list"
        expected = "at least 1"
        return _wrong(
            channels.span, f"a link has `{written}` channels; {expected} was expected", f"expected {expected}"
        )
    return (ends[0], ends[1]), value


def _parse_end(node: Node, form: str) -> _End | Diagnostic:
    if not isinstance(node, ListNode) or len(node.items) != 2:  # noqa: PLR2004 - a mesh and a device
        return _wrong(
            node.span,
            f"an end of a link in `Graph` is not a mesh and a device; {form} was expected",
            f"expected {form}",
        )
    mesh = _parse_mesh(node.items[0], node.span, form)
    device = _number(node.items[1], _DEVICE)
    if isinstance(mesh, Diagnostic):
        return mesh
    if device is None:
        return _wrong_word(node.items[1], "a device such as `D1`", form)
    return replace(mesh, device=device)


def _parse_mesh(node: Node, span: Span, form: str) -> _End | Diagnostic:
    mesh = _number(node, _MESH)
    return _wrong_word(node, "a mesh such as `M0`", form) if mesh is None else _End(mesh, None, span)


def _number(node: Node, pattern: re.Pattern[str]) -> int | None:
    match = pattern.match(node.value) if isinstance(node, ScalarNode) and isinstance(node.value, str) else None
    return int(match[1]) if match else None


def _check_ends(ends: tuple[_End, _End], meshes: Mapping[MeshId, Mesh]) -> list[Diagnostic]:
    found = []
    for end in ends:
        mesh = meshes.get(MeshId(end.mesh))
        if mesh is None:
            message = f"a link names mesh {end.mesh}, which does not exist"
            found.append(Diagnostic(codes.LINK_TO_NOWHERE, message, Label(end.span, f"no mesh has id {end.mesh}")))
            continue
        count = mesh.device_shape[0] * mesh.device_shape[1]
        if end.device is not None and end.device >= count:
            message = f"a link names device {end.device} of mesh {end.mesh}, which has {count} devices"
            found.append(Diagnostic(codes.DEVICE_NUMBER, message, Label(end.span, f"expected D0 to D{count - 1}")))
    if not found and ends[0].mesh == ends[1].mesh:
        message = f"a link connects mesh {ends[0].mesh} to itself"
        found.append(Diagnostic(codes.LINK_TO_ITSELF, message, Label(ends[1].span, "expected another mesh")))
    return found


def _wrong_word(node: Node, expected: str, form: str) -> Diagnostic:
    written = f"`{shown(node.written)}`" if isinstance(node, ScalarNode) else "a list"
    return _wrong(node.span, f"a link names {written}; {expected} was expected", f"expected {expected}, as in {form}")


def _wrong(span: Span, message: str, label: str) -> Diagnostic:
    return Diagnostic(TOPOLOGY.wrong_value, message, Label(span, label))


def _rows(node: Node | None) -> tuple[Node, ...]:
    return node.items if isinstance(node, ListNode) else ()
