"""Read the links of release 0.63: `[[0, E0], [1, W0]]` between single ports, each cable listed from both its ends.

Ports of an edge are counted along it: with two ports per direction `E0` and `E1` are those of the device in the first
row of the last column, `E2` and `E3` of the one below. Each cable is one channel between the devices at its ends.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.nodes import ListNode, MapNode, Node, ScalarNode
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.model import Link, Mesh, MeshId

_PORT = re.compile(r"([NESWZ])([0-9]{1,9})\Z", re.IGNORECASE)
_FORM = "`[[0, E0], [1, W0]]`"
_PAIR = 2


@dataclass(frozen=True)
class _Port:
    """A port of a mesh, with the device that has it."""

    mesh: int
    name: str
    device: int
    span: Span

    @property
    def key(self) -> tuple[int, str]:
        return self.mesh, self.name

    def __str__(self) -> str:
        return f"{self.name} of mesh {self.mesh}"


def parse_port_links(
    root: MapNode, meshes: Mapping[MeshId, Mesh], ports: Mapping[str, int]
) -> tuple[list[Link], list[Diagnostic]]:
    """Read a `Graph` of ports."""
    found: list[Diagnostic] = []
    cables: dict[tuple[tuple[int, str], tuple[int, str]], tuple[_Port, _Port, Span]] = {}
    taken: dict[tuple[int, str], tuple[_Port, tuple[int, str]]] = {}
    graph = root.entries.get("Graph")
    for row in graph.items if isinstance(graph, ListNode) else ():
        cable = _cable(row, meshes, ports)
        if isinstance(cable, Diagnostic):
            found.append(cable)
            continue
        here, there = cable
        key = (here.key, there.key)
        mistake = _cable_problem(here, there, row.span, cables, taken)
        if mistake:
            found.append(mistake)
            continue
        cables[key] = (here, there, row.span)
        taken[here.key] = (here, there.key)
    if not found:
        one_sided = [cable for (a, b), cable in cables.items() if (b, a) not in cables]
        found += [_one_sided(*cable) for cable in one_sided]
    return _links([cable for (a, b), cable in cables.items() if a < b or (b, a) not in cables]), found


def _cable(row: Node, meshes: Mapping[MeshId, Mesh], ports: Mapping[str, int]) -> tuple[_Port, _Port] | Diagnostic:
    if not isinstance(row, ListNode) or len(row.items) != _PAIR:
        many = f"a list of {len(row.items)}" if isinstance(row, ListNode) else "no list"
        message = f"a link is {many}; {_FORM} was expected, as in the other links"
        return Diagnostic(TOPOLOGY.wrong_value, message, Label(row.span, f"expected {_FORM}"))
    here = _port(row.items[0], meshes, ports)
    if isinstance(here, Diagnostic):
        return here
    there = _port(row.items[1], meshes, ports)
    return there if isinstance(there, Diagnostic) else (here, there)


def _port(node: Node, meshes: Mapping[MeshId, Mesh], ports: Mapping[str, int]) -> _Port | Diagnostic:
    values = node.items if isinstance(node, ListNode) else ()
    mesh_id, word = (value.value if isinstance(value, ScalarNode) else None for value in (*values, None, None)[:_PAIR])
    match = _PORT.match(word) if isinstance(word, str) else None
    if len(values) != _PAIR or type(mesh_id) is not int or match is None:
        message = f"an end of a link is not a mesh and a port; {_FORM} was expected"
        return Diagnostic(
            TOPOLOGY.wrong_value, message, Label(node.span, "expected a mesh and a port such as `[0, E0]`")
        )
    mesh = meshes.get(MeshId(mesh_id))
    if mesh is None:
        message = f"a link names mesh {mesh_id}, which does not exist"
        return Diagnostic(codes.LINK_TO_NOWHERE, message, Label(values[0].span, f"no mesh has id {mesh_id}"))
    letter, number = match[1].upper(), int(match[2])
    device, most = _device(mesh, letter, number, ports.get(letter, 0))
    if device is None:
        message = f"a link names port {shown(word)} of mesh {mesh_id}, whose {_SIDES[letter]} has {most}"
        expected = f"expected {letter}0 to {letter}{most - 1}" if most else "no port there"
        sums = f"{mesh.device_shape[0]} × {mesh.device_shape[1]} devices, {ports.get(letter, 0)} ports each"
        return Diagnostic(codes.PORT_NUMBER, message, Label(values[1].span, expected), (Label(mesh.span, sums),))
    return _Port(mesh_id, f"{letter}{number}", device, node.span)


_SIDES = {"N": "north edge", "E": "east edge", "S": "south edge", "W": "west edge", "Z": "Z side"}


def _device(mesh: Mesh, letter: str, number: int, ports: int) -> tuple[int | None, int]:
    """The device that has the port, None past the end; and how many ports that side has."""
    rows, columns = mesh.device_shape
    length = {"N": columns, "S": columns, "E": rows, "W": rows, "Z": rows * columns}[letter]
    if number >= length * ports:
        return None, length * ports
    along = number // ports
    device = {
        "N": along,
        "S": (rows - 1) * columns + along,
        "W": along * columns,
        "E": along * columns + columns - 1,
        "Z": along,
    }
    return device[letter], length * ports


def _cable_problem(
    here: _Port,
    there: _Port,
    span: Span,
    cables: Mapping[tuple[tuple[int, str], tuple[int, str]], tuple[_Port, _Port, Span]],
    taken: Mapping[tuple[int, str], tuple[_Port, tuple[int, str]]],
) -> Diagnostic | None:
    if here.mesh == there.mesh:
        message = f"a link connects mesh {here.mesh} to itself"
        return Diagnostic(codes.LINK_TO_ITSELF, message, Label(there.span, "expected another mesh"))
    known = cables.get((here.key, there.key))
    if known:
        message = f"the link from {here} to {there} is given twice"
        labels = (Label(known[2], "first given here"),)
        return Diagnostic(codes.LINK_TWICE, message, Label(span, "and again here"), labels)
    if here.key in taken:
        message = f"port {here} has two links"
        labels = (Label(taken[here.key][0].span, "the other is here"),)
        return Diagnostic(codes.LINK_TWICE, message, Label(here.span, "one port has one cable"), labels)
    return None


def _one_sided(here: _Port, there: _Port, span: Span) -> Diagnostic:
    message = f"the link from {here} to {there} is given in one direction only"
    back = f"[[{there.mesh}, {there.name}], [{here.mesh}, {here.name}]]"
    hints = (f"add `{back}`",)
    return Diagnostic(codes.ONE_SIDED_LINK, message, Label(span, "its way back is missing"), hints=hints)


def _links(cables: list[tuple[_Port, _Port, Span]]) -> list[Link]:
    joined: dict[tuple[int, int], list[tuple[_Port, _Port, Span]]] = {}
    for here, there, span in cables:
        low, high = sorted((here, there), key=lambda port: port.mesh)
        joined.setdefault((low.mesh, high.mesh), []).append((low, high, span))
    links = []
    for (a, b), rows in joined.items():
        devices: dict[tuple[int, int], int] = {}
        for low, high, _ in rows:
            devices[low.device, high.device] = devices.get((low.device, high.device), 0) + 1
        pairs = tuple(sorted((low, high, count) for (low, high), count in devices.items()))
        links.append(Link(MeshId(a), MeshId(b), len(rows), rows[0][2], pairs, "STRICT"))
    return links
