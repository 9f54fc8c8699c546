"""Read a mesh graph descriptor, version 1 (`mgd.yaml`): which chip, which boards, which meshes, how they are linked.

Four generations of this format are in circulation; the shapes are those of the vendor's releases. `host_ranks` inside a
mesh is the oldest (A) or release 0.62 (B), a `Graph` between single ports (`[[0, E0], [1, W0]]`) is 0.62 or 0.63 (C), a
`Graph` between devices or a `RelaxedGraph` is 0.64 (D). C and D are read in full. A and B are recognised, the diagnostic
names what to change, and only `ttlaunch convert` reads them. What the vendor's parser accepts in silence (two meshes with one
id, ports that differ per direction, a link twice) is an error here.
"""

import re

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label, Severity, has_errors
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import closest, listed, shown
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.collecting import collection_paused
from ttlaunch.spec.located.nodes import Key, ListNode, MapNode, Node, ScalarNode, node_at, span_of
from ttlaunch.spec.located.schema import check_schema
from ttlaunch.spec.located.yaml import parse_yaml
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.graph_rules import check_graph
from ttlaunch.spec.topology.mesh_graph import ARCHITECTURES, MeshGraph
from ttlaunch.spec.topology.mesh_links import parse_links
from ttlaunch.spec.topology.model import Link, Mesh, MeshId
from ttlaunch.spec.topology.port_links import parse_port_links
from ttlaunch.spec.topology.schema import BoardRow, MeshGraphFile, MeshRow

DIM_TYPES = {
    "Mesh": ("LINE", "LINE"),
    "TORUS_X": ("LINE", "RING"),
    "TORUS_Y": ("RING", "LINE"),
    "TORUS_XY": ("RING", "RING"),
}
_BOARD_TYPES = tuple(DIM_TYPES)
_DIRECTIONS = {"N": "north", "E": "east", "S": "south", "W": "west"}
_PORT = re.compile(r"[NESWZ][0-9]+\Z", re.IGNORECASE)
_RELAXED = "write links as `RelaxedGraph: [[M0, M1, 2]]`: two meshes and their number of channels, each pair once"


@collection_paused()
def parse_mesh_graph(source: Source) -> tuple[MeshGraph | None, list[Diagnostic]]:
    """Read the text of a descriptor; None if it is too broken for other files to be checked against it."""
    root, found = parse_yaml(source, codes=TOPOLOGY)
    if root is None:
        return None, found
    old = recognise_generation(root)
    if old:
        return None, [*found, old]
    graph, mistakes = mesh_graph_of(root)
    return graph, found + mistakes


def mesh_graph_of(root: Node) -> tuple[MeshGraph | None, list[Diagnostic]]:
    """The mesh graph that a descriptor of release 0.63 or 0.64 describes."""
    found: list[Diagnostic] = []
    file, mistakes = check_schema(MeshGraphFile, root, codes=TOPOLOGY)
    found += mistakes
    if file is None or not isinstance(root, MapNode):
        return None, found
    found += _check_chip(file, root)
    boards, mistakes = _boards(file.boards, root)
    found += mistakes
    found += _check_mesh_ids(file.meshes, root)
    meshes = []
    for index, row in enumerate(file.meshes):
        mistake = _check_shape(row, index, boards, root)
        found += [mistake] if mistake else []
        meshes.append(_mesh(row, root, index, boards, file))
    ports = _ports(file)
    links, mistakes = _links(root, {mesh.id: mesh for mesh in meshes}, ports)
    found += mistakes
    graph = MeshGraph(file.chip_spec.arch.lower(), tuple(meshes), tuple(links), root.keys["Mesh"], ports=ports)
    return graph, found + ([] if has_errors(found) else check_graph(graph))


def _links(root: MapNode, meshes: dict[MeshId, Mesh], ports: dict[str, int]) -> tuple[list[Link], list[Diagnostic]]:
    if first_port(root) is not None and not getattr(root.entries.get("RelaxedGraph"), "items", ()):
        return parse_port_links(root, meshes, ports)
    return parse_links(root, meshes)


def _mesh(row: MeshRow, root: Node, index: int, boards: dict[str, tuple[BoardRow, int]], file: MeshGraphFile) -> Mesh:
    rows, columns = row.device_topology
    host_rows, host_columns = row.host_topology
    span = span_of(root, ("Mesh", index, "id"))
    board = boards.get(str(row.board))
    kinds = {name.lower(): dim_types for name, dim_types in DIM_TYPES.items()}
    dim_types = kinds.get(board[0].type.lower(), DIM_TYPES["Mesh"]) if board else DIM_TYPES["Mesh"]
    shapes = (rows, columns), (host_rows, host_columns)
    return Mesh(MeshId(row.id), str(row.board), *shapes, span, dim_types, max(_ports(file)["N"], 0))


def _ports(file: MeshGraphFile) -> dict[str, int]:
    ports = file.chip_spec.ethernet_ports
    counts = {letter: int(getattr(ports, field)) for letter, field in _DIRECTIONS.items()}
    return counts | ({} if ports.z is None else {"Z": ports.z})


def _check_chip(file: MeshGraphFile, root: Node) -> list[Diagnostic]:
    found = []
    arch = file.chip_spec.arch
    if arch.lower() not in ARCHITECTURES:
        found.append(_unknown_word("arch", arch, ARCHITECTURES, root, ("ChipSpec", "arch")))
    ports = {letter: getattr(file.chip_spec.ethernet_ports, field) for letter, field in _DIRECTIONS.items()}
    usual = max(ports.values(), key=list(ports.values()).count)
    odd = [letter for letter, count in ports.items() if count != usual]
    if odd:
        written = ", ".join(f"{letter}: {count}" for letter, count in ports.items())
        label = Label(span_of(root, ("ChipSpec", "ethernet_ports", odd[0])), f"expected {usual}, as in the others")
        message = f"`ethernet_ports` differ per direction: {written}"
        found.append(Diagnostic(codes.UNEVEN_PORTS, message, label))
    return found


def _boards(rows: list[BoardRow], root: Node) -> tuple[dict[str, tuple[BoardRow, int]], list[Diagnostic]]:
    found: list[Diagnostic] = []
    boards: dict[str, tuple[BoardRow, int]] = {}
    for index, row in enumerate(rows):
        if row.type.lower() not in {word.lower() for word in _BOARD_TYPES}:
            found.append(_unknown_word("type", row.type, _BOARD_TYPES, root, ("Board", index, "type")))
        name = str(row.name)
        if name in boards:
            here = Label(span_of(root, ("Board", index, "name")), "and again here")
            first = Label(span_of(root, ("Board", boards[name][1], "name")), "first defined here")
            found.append(Diagnostic(codes.BOARD_TWICE, f"board `{shown(name)}` is defined twice", here, (first,)))
        else:
            boards[name] = (row, index)
    return boards, found


def _unknown_word(key: str, word: str, known: tuple[str, ...], root: Node, path: tuple[Key, ...]) -> Diagnostic:
    message = f"`{key}` is `{shown(word)}`; {listed(known)} was expected"
    meant = closest(word, known)
    hints = (f"did you mean `{meant}`?",) if meant else ()
    return Diagnostic(
        TOPOLOGY.wrong_value, message, Label(span_of(root, path), f"expected {listed(known)}"), hints=hints
    )


def _check_mesh_ids(rows: list[MeshRow], root: Node) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    first: dict[int, int] = {}
    for index, row in enumerate(rows):
        if row.id in first:
            here = Label(span_of(root, ("Mesh", index, "id")), "and again here")
            there = Label(span_of(root, ("Mesh", first[row.id], "id")), "first defined here")
            found.append(Diagnostic(codes.MESH_TWICE, f"mesh {row.id} is defined twice", here, (there,)))
        else:
            first[row.id] = index
    missing = next((number for number in range(len(first)) if number not in first), None)
    if missing is not None and not has_errors(found):
        above = min(number for number in first if number > missing)
        label = Label(span_of(root, ("Mesh", first[above], "id")), f"expected {missing}")
        message = f"mesh ids have a gap: there is a mesh {above} but no mesh {missing}"
        found.append(Diagnostic(codes.MESH_GAP, message, label, severity=Severity.WARNING))
    return found


def _check_shape(row: MeshRow, index: int, boards: dict[str, tuple[BoardRow, int]], root: Node) -> Diagnostic | None:
    """`device_topology` is `host_topology` times the board's `topology`: each host owns one board-sized block."""
    known = boards.get(str(row.board))
    if known is None:
        label = Label(span_of(root, ("Mesh", index, "board")), f"expected {listed(shown(name) for name in boards)}")
        meant = closest(str(row.board), boards)
        hints = (f"did you mean `{shown(meant)}`?",) if meant else ()
        message = f"mesh {row.id} is made of board `{shown(row.board)}`, which does not exist"
        return Diagnostic(codes.MISSING_BOARD, message, label, hints=hints)
    board, board_index = known
    expected = [hosts * devices for hosts, devices in zip(row.host_topology, board.topology, strict=True)]
    if row.device_topology == expected:
        return None
    sums = f"hosts {row.host_topology} × board {board.topology} = {expected}"
    message = f"mesh {row.id} has device_topology {row.device_topology}, but its hosts make {expected}"
    others = (
        Label(_value_span(root, ("Mesh", index, "host_topology")), f"{_times(row.host_topology)} hosts"),
        Label(_value_span(root, ("Board", board_index, "topology")), f"{_times(board.topology)} devices on a board"),
    )
    return Diagnostic(codes.SHAPES, message, Label(_value_span(root, ("Mesh", index, "device_topology")), sums), others)


def _value_span(root: Node, path: tuple[Key, ...]) -> Span:
    """The list itself rather than the key that holds it."""
    found = node_at(root, path)
    return found.span if found is not None else span_of(root, path)


def _times(shape: list[int]) -> str:
    return " × ".join(str(extent) for extent in shape)


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
