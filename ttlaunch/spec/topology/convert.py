"""Convert a mesh graph descriptor between YAML (version 1) and text format (version 2), and older YAML into the newest.

What both versions can express is kept; there is a note for each thing that the other version cannot express. Comments are
lost.

Older YAML is first upgraded to the shape of release 0.63. Before 0.62 a mesh had the `topology` of its boards, and
`host_ranks` whose shape is that of its hosts; in 0.62 `host_ranks` repeats `host_topology`. Links between ports stay.
"""

import re
from dataclasses import dataclass
from typing import Literal

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label, fold_repeats, has_errors
from ttlaunch.diagnostics.span import Source
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.nodes import Key, ListNode, MapNode, Node, ScalarNode, node_at, plain
from ttlaunch.spec.located.yaml import parse_yaml
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.convert_to_textproto import textproto_of, write_textproto
from ttlaunch.spec.topology.convert_to_yaml import yaml_of
from ttlaunch.spec.topology.load import is_textproto
from ttlaunch.spec.topology.mesh_graph import MeshGraph
from ttlaunch.spec.topology.mgd_schema import DescriptorFile
from ttlaunch.spec.topology.mgd_textproto import parse_mesh_graph_textproto
from ttlaunch.spec.topology.mgd_yaml import mesh_graph_of
from ttlaunch.spec.topology.recognise import Kind, OtherKind, explain_other_kinds, kind_of_content

_PORTS = re.compile(r"\[\s*[0-9]+\s*,\s*[NESWZ][0-9]+\s*\]", re.IGNORECASE)
Version = Literal["yaml", "textproto"]
_TYPES = {"torus_2d": "TORUS_XY"}


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        text: The converted descriptor; None if a diagnostic is an error.
        notes: What the other version cannot express.
    """

    text: str | None
    diagnostics: list[Diagnostic]
    notes: list[str]


def version_of(source: Source) -> Version:
    """Return the version of a descriptor; see `is_textproto`."""
    return "textproto" if is_textproto(source) else "yaml"


def convert(source: Source, *, to: Version) -> Converted:
    """Read a descriptor of either version and any generation, and write it as the requested one."""
    kind = kind_of_content(source)
    if kind and kind is not Kind.MGD:
        return Converted(None, list(explain_other_kinds([OtherKind(source, Kind.MGD, kind)])), [])
    graph, file, found = read_any(source)
    if graph is None or has_errors(found):
        return Converted(None, fold_repeats(found), [])
    if to == "yaml":
        text, notes = yaml_of(graph, file)
    else:
        written, notes = (file, []) if file is not None else textproto_of(graph)
        text = write_textproto(written)
    if file is None and _PORTS.search(source.text):
        notes.append("links of ports were written as links of devices; which port of a device it is was left out")
    return Converted(text, found, notes)


def read_any(source: Source) -> tuple[MeshGraph | None, DescriptorFile | None, list[Diagnostic]]:
    """Read a descriptor of any generation into its mesh graph; of version 2 also return the file as written."""
    if version_of(source) == "textproto":
        read, found = parse_mesh_graph_textproto(source)
        return (read.graph, read.file, found) if read else (None, None, found)
    root, found = parse_yaml(source, codes=TOPOLOGY)
    if root is None:
        return None, None, found
    root, mistakes = upgrade(root)
    found += mistakes
    if has_errors(mistakes):
        return None, None, found
    graph, mistakes = mesh_graph_of(root)
    return graph, None, found + mistakes


def upgrade(root: Node) -> tuple[Node, list[Diagnostic]]:
    """Return the tree in the shape of release 0.63; new values have the places of the old ones."""
    rows = node_at(root, ("Mesh",))
    if not isinstance(root, MapNode) or not isinstance(rows, ListNode):
        return root, []
    boards = node_at(root, ("Board",))
    shapes = {}
    for board in boards.items if isinstance(boards, ListNode) else ():
        values = plain(board)
        if isinstance(values, dict) and isinstance(values.get("name"), str | int):
            shapes[str(values["name"])] = values.get("topology")
    found: list[Diagnostic] = []
    meshes = tuple(_mesh(row, shapes, found) if isinstance(row, MapNode) else row for row in rows.items)
    changed: dict[Key, Node] = {"Mesh": ListNode(rows.span, meshes)}
    if isinstance(boards, ListNode):
        kinds = tuple(_board(row, found) if isinstance(row, MapNode) else row for row in boards.items)
        changed["Board"] = ListNode(boards.span, kinds)
    return MapNode(root.span, root.entries | changed, root.keys), found


def _mesh(row: MapNode, shapes: dict[str, object], found: list[Diagnostic]) -> MapNode:
    entries, keys = dict(row.entries), dict(row.keys)
    ranks = entries.pop("host_ranks", None)
    shape = _shape_of(plain(ranks)) if ranks is not None else None
    if ranks is not None and shape is None:
        message = "`host_ranks` is no grid of numbers"
        label = Label(row.keys["host_ranks"], "expected such as `[[0, 1]]`")
        found.append(Diagnostic(codes.WRONG_VALUE, message, label))
    keys.pop("host_ranks", None)
    if "topology" in entries:
        old, place = entries.pop("topology"), keys.pop("topology")
        board = shapes.get(str(plain(entries.get("board", old))))
        times = plain(old)
        if _is_shape(board) and _is_shape(times):
            product = [a * b for a, b in zip(times, board, strict=True)]  # type: ignore[call-overload] # two lists
            entries["device_topology"], keys["device_topology"] = _list(old, product), place
            entries.setdefault("host_topology", _list(ranks or old, shape or times))
            keys.setdefault("host_topology", place)
        else:
            entries["device_topology"], keys["device_topology"] = old, place
    elif ranks is not None and shape and "host_topology" in entries and plain(entries["host_topology"]) != shape:
        message = f"`host_ranks` is a grid of {shape}, but `host_topology` is {plain(entries['host_topology'])}"
        labels = (Label(entries["host_topology"].span, ""),)
        found.append(Diagnostic(codes.SHAPES, message, Label(row.keys["host_ranks"]), labels))
    return MapNode(row.span, entries, keys)


def _board(row: MapNode, found: list[Diagnostic]) -> MapNode:
    kind = row.entries.get("type")
    if not isinstance(kind, ScalarNode) or not isinstance(kind.value, str):
        return row
    if kind.value.lower() == "torus_1d":
        message = f"`type` is `{shown(kind.value)}`, which does not determine which dimension is a ring"
        hints = ("write TORUS_X to close the rows, or TORUS_Y to close the columns",)
        found.append(Diagnostic(TOPOLOGY.wrong_value, message, Label(kind.span), hints=hints))
    newer = ScalarNode(kind.span, _TYPES.get(kind.value.lower(), kind.value), kind.quoted, kind.text)
    return MapNode(row.span, row.entries | {"type": newer}, row.keys)


def _list(place: Node, values: list[int]) -> ListNode:
    return ListNode(place.span, tuple(ScalarNode(place.span, value) for value in values))


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value)  # noqa: PLR2004 - rows, columns


def _shape_of(grid: object) -> list[int] | None:
    if not isinstance(grid, list) or not grid or not all(isinstance(row, list) and row for row in grid):
        return None
    return [len(grid), len(grid[0])] if all(len(row) == len(grid[0]) for row in grid) else None
