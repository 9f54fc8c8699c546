"""Tell the generations of `mgd.yaml` apart, and say how to turn an older one into the last.

The shapes are those of the vendor's releases: `host_ranks` inside a mesh is the oldest (A) or 0.62 (B), a `Graph`
between single ports (`[[0, E0], [1, W0]]`) is 0.62 or 0.63 (C), a `Graph` between devices or a `RelaxedGraph` is 0.64
(D). C and D are read as they are; A and B only by `ttlaunch convert`.
"""

import re

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Span
from ttlaunch.spec.located.nodes import ListNode, MapNode, Node, ScalarNode
from ttlaunch.spec.topology import codes

_PORT = re.compile(r"[NESWZ][0-9]+\Z", re.IGNORECASE)
_RELAXED = "write links as `RelaxedGraph: [[M0, M1, 2]]`: two meshes and their number of channels, each pair once"


def recognise_generation(root: Node) -> Diagnostic | None:
    """The diagnostic for a descriptor of a generation that is not read; None for the one that is, or for neither."""
    if not isinstance(root, MapNode):
        return None
    meshes = [row for row in _items(root.entries.get("Mesh")) if isinstance(row, MapNode)]
    oldest = next((row.keys["topology"] for row in meshes if "topology" in row.keys), None)
    if oldest:
        hints = (
            "replace `topology` in each mesh by `device_topology`, and `host_ranks` by `host_topology: [rows, columns]`",
            _RELAXED,
        )
        return _old("A", "before release 0.62", oldest, "a mesh has `topology`", hints)
    ranks = next((row.keys["host_ranks"] for row in meshes if "host_ranks" in row.keys), None)
    if ranks:
        hints = ("remove `host_ranks` from each mesh; `host_topology` says the same", _RELAXED)
        return _old("B", "release 0.62", ranks, "a mesh has `host_ranks`", hints)
    return None


def first_port(root: MapNode) -> Span | None:
    """The place of the first port in a link, which makes the file one of generation C; None in the last one."""
    return next((found for row in _items(root.entries.get("Graph")) if (found := _port(row))), None)


def _old(generation: str, release: str, span: Span, sign: str, hints: tuple[str, ...]) -> Diagnostic:
    hints = (*hints, "or let `ttlaunch convert` write it anew")
    message = f"{span.source.name} is a mesh graph descriptor of generation {generation} ({release}), which is not read"
    return Diagnostic(codes.OLD_GENERATION, message, Label(span, sign), hints=hints)


def _port(row: Node) -> Span | None:
    """The place of a port such as `E0` in a link."""
    for end in _items(row):
        for word in _items(end):
            if isinstance(word, ScalarNode) and isinstance(word.value, str) and _PORT.match(word.value):
                return word.span
    return None


def _items(node: Node | None) -> tuple[Node, ...]:
    return node.items if isinstance(node, ListNode) else ()
