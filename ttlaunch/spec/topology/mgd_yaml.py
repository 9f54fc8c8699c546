"""Read a mesh graph descriptor, version 1 (`mgd.yaml`): which chip, which boards, which meshes, how they are linked.

Four generations of this format are in circulation; the shapes are those of the vendor's releases. `host_ranks` inside a
mesh is the oldest (A) or release 0.62 (B), a `Graph` between single ports (`[[0, E0], [1, W0]]`) is 0.62 or 0.63 (C), a
`Graph` between devices or a `RelaxedGraph` is 0.64 (D). C and D are read in full. A and B are recognised, the diagnostic
names what to change, and only `ttlaunch convert` reads them. What the vendor's parser silently accepts (two meshes with one
id, ports that differ per direction, a link twice) is an error here.
"""

import re

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label, has_errors
from ttlaunch.diagnostics.span import Source, Span
from ttlaunch.diagnostics.suggest import did_you_mean, listed, shown
from ttlaunch.no_cycles import collection_paused
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.findings import Findings
from ttlaunch.spec.located.nodes import Key, MapNode, Node, ScalarNode, items_of, node_at, span_of
from ttlaunch.spec.located.schema import check_schema
from ttlaunch.spec.located.yaml import parse_yaml
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.graph_rules import check_graph, check_mesh_gap
from ttlaunch.spec.topology.mesh_graph import ARCHITECTURES, MeshGraph
from ttlaunch.spec.topology.mesh_links import parse_links
from ttlaunch.spec.topology.model import Mesh, MeshId
from ttlaunch.spec.topology.port_links import parse_port_links
from ttlaunch.spec.topology.schema import BoardRow, MeshGraphFile, MeshRow

DIM_TYPES = {
    "Mesh": ("LINE", "LINE"),
    "TORUS_X": ("LINE", "RING"),
    "TORUS_Y": ("RING", "LINE"),
    "TORUS_XY": ("RING", "RING"),
}
_BOARD_TYPES = tuple(DIM_TYPES)
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
    """Return the mesh graph that a descriptor of release 0.63 or 0.64 describes; None if its schema is broken."""
    file, found = check_schema(MeshGraphFile, root, codes=TOPOLOGY)
    if file is None or not isinstance(root, MapNode):
        return None, found
    findings = Findings(root, found)
    ports = _ports(file)
    _check_chip(file, findings)
    boards = _boards(file.boards, findings)
    _check_mesh_ids(file.meshes, findings)
    meshes = []
    for index, row in enumerate(file.meshes):
        board = boards.get(str(row.board))
        if board is None:
            _missing_board(row, ("Mesh", index, "board"), boards, findings=findings)
        else:
            _check_shape(row, file.boards[board], findings, paths=(("Mesh", index), ("Board", board)))
        kind = "" if board is None else file.boards[board].type.upper()
        meshes.append(_mesh(row, span_of(root, ("Mesh", index, "id")), kind=kind, channels=ports["N"]))
    by_id = {mesh.id: mesh for mesh in meshes}
    if len(by_id) < len(meshes):
        # Which id the second mesh was meant to have is not known, so links and bindings cannot be checked.
        return None, found
    missing: set[int] = set()
    if _has_ports(root) and not items_of(root.entries.get("RelaxedGraph")):
        links, mistakes = parse_port_links(root, by_id, ports, missing=missing)
    else:
        links, mistakes = parse_links(root, by_id, missing=missing)
    found += mistakes
    graph = MeshGraph(
        file.chip_spec.arch.lower(),
        tuple(meshes),
        tuple(links),
        root.keys["Mesh"],
        ports=ports,
        missing=frozenset(missing),
    )
    return graph, found + ([] if has_errors(found) else check_graph(graph))


def _has_ports(root: MapNode) -> bool:
    """Return whether a link names a port such as `E0`, which makes the file one of generation C."""
    words = (word for row in items_of(root.entries.get("Graph")) for end in items_of(row) for word in items_of(end))
    return any(isinstance(word, ScalarNode) and _PORT.match(str(word.value)) for word in words)


def _mesh(row: MeshRow, span: Span, *, kind: str, channels: int) -> Mesh:
    rows, columns = row.device_topology
    host_rows, host_columns = row.host_topology
    shapes = (rows, columns), (host_rows, host_columns)
    dim_types = DIM_TYPES.get(kind, DIM_TYPES["Mesh"])
    return Mesh(MeshId(row.id), str(row.board), *shapes, span, dim_types, channels)


def _ports(file: MeshGraphFile) -> dict[str, int]:
    ports = file.chip_spec.ethernet_ports
    counts = {"N": ports.north, "E": ports.east, "S": ports.south, "W": ports.west}
    return counts | ({} if ports.z is None else {"Z": ports.z})


def _check_chip(file: MeshGraphFile, findings: Findings) -> None:
    _check_word("arch", file.chip_spec.arch, ARCHITECTURES, findings=findings, path=("ChipSpec", "arch"))
    ports = {letter: count for letter, count in _ports(file).items() if letter != "Z"}
    usual = max(ports.values(), key=list(ports.values()).count)
    odd = [letter for letter, count in ports.items() if count != usual]
    if odd:
        written = ", ".join(f"{letter}: {count}" for letter, count in ports.items())
        message = f"`ethernet_ports` differ per direction: {written}"
        place = ("ChipSpec", "ethernet_ports", odd[0])
        findings.add(codes.UNEVEN_PORTS, message, place, label=f"expected {usual}, as in the others")


def _boards(rows: list[BoardRow], findings: Findings) -> dict[str, int]:
    """Return the index of each board in the list, by its name."""
    boards: dict[str, int] = {}
    for index, row in enumerate(rows):
        _check_word("type", row.type, _BOARD_TYPES, findings=findings, path=("Board", index, "type"))
        first = boards.setdefault(str(row.name), index)
        if first != index:
            message, place = f"board `{shown(row.name)}` is defined twice", ("Board", index, "name")
            findings.twice(codes.BOARD_TWICE, message, place, first=("Board", first, "name"), verb="defined")
    return boards


def _check_word(key: str, word: str, known: tuple[str, ...], *, findings: Findings, path: tuple[Key, ...]) -> None:
    """Check that a value is one of a few words, in any letter case."""
    if word.lower() not in {one.lower() for one in known}:
        message = f"`{key}` is `{shown(word)}`; {listed(known)} was expected"
        hint = "".join(did_you_mean(word, known))
        findings.add(TOPOLOGY.wrong_value, message, path, label=f"expected {listed(known)}", hint=hint)


def _check_mesh_ids(rows: list[MeshRow], findings: Findings) -> None:
    first: dict[int, int] = {}
    for index, row in enumerate(rows):
        if first.setdefault(row.id, index) != index:
            message, place = f"mesh {row.id} is defined twice", ("Mesh", index, "id")
            findings.twice(codes.MESH_TWICE, message, place, first=("Mesh", first[row.id], "id"), verb="defined")
    if len(first) == len(rows):
        spans = {number: findings.span(("Mesh", index, "id")) for number, index in first.items()}
        findings.found += check_mesh_gap(spans)


def _missing_board(row: MeshRow, path: tuple[Key, ...], boards: dict[str, int], *, findings: Findings) -> None:
    known = [shown(name) for name in boards]
    message = f"a mesh is made of board `{shown(row.board)}`, which does not exist"
    hint = "".join(did_you_mean(str(row.board), known))
    findings.add(codes.MISSING_BOARD, message, path, label=f"expected {listed(known)}", hint=hint)


def _check_shape(
    row: MeshRow, board: BoardRow, findings: Findings, *, paths: tuple[tuple[Key, ...], tuple[Key, ...]]
) -> None:
    """`device_topology` is `host_topology` times the board's `topology`: each host owns one board-sized block."""
    expected = [hosts * devices for hosts, devices in zip(row.host_topology, board.topology, strict=True)]
    if row.device_topology == expected:
        return
    sums = f"hosts {row.host_topology} × board {board.topology} = {expected}"
    message = f"a mesh has device_topology {row.device_topology}, but its hosts make {expected}"
    here, there = paths
    places = ((*here, "device_topology"), (*here, "host_topology"), (*there, "topology"))
    texts = (sums, f"{_times(row.host_topology)} hosts", f"{_times(board.topology)} devices on a board")
    # The list itself is marked, not the key that holds it.
    nodes = [node_at(findings.root, place) or findings.root for place in places]
    labels = [Label(node.span, text) for node, text in zip(nodes, texts, strict=True)]
    findings.found.append(Diagnostic(codes.SHAPES, message, labels[0], tuple(labels[1:])))


def _times(shape: list[int]) -> str:
    return " × ".join(str(extent) for extent in shape)


def recognise_generation(root: Node) -> Diagnostic | None:
    """Return the diagnostic for a descriptor of generation A or B, which are not read; None for any other."""
    meshes = [row for row in items_of(node_at(root, ("Mesh",))) if isinstance(row, MapNode)]
    oldest = next((row.keys["topology"] for row in meshes if "topology" in row.keys), None)
    if oldest:
        shapes = (
            "replace `topology` in each mesh by `device_topology`, and `host_ranks` by `host_topology: [rows, columns]`"
        )
        return _old("A (before release 0.62)", oldest, key="topology", hint=shapes)
    ranks = next((row.keys["host_ranks"] for row in meshes if "host_ranks" in row.keys), None)
    if ranks:
        repeated = "remove `host_ranks` from each mesh; `host_topology` means the same"
        return _old("B (release 0.62)", ranks, key="host_ranks", hint=repeated)
    return None


def _old(generation: str, span: Span, *, key: str, hint: str) -> Diagnostic:
    message = f"{span.source.name} is a mesh graph descriptor of generation {generation}, which is not read"
    hints = (hint, _RELAXED, "or rewrite it with `ttlaunch convert`")
    return Diagnostic(codes.OLD_GENERATION, message, Label(span, f"a mesh has `{key}`"), hints=hints)
