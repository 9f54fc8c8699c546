"""Read the links of release 0.63: `[[0, E0], [1, W0]]` between single ports, each cable listed from both its ends.

Ports of an edge are counted along it: with two ports per direction `E0` and `E1` are those of the device in the first
row of the last column, `E2` and `E3` of the one below. Each cable is one channel between the devices at its ends.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ttlaunch.diagnostics.diagnostic import Diagnostic, given_twice, mistake_at
from ttlaunch.diagnostics.span import Span
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.located.nodes import ListNode, MapNode, Node, ScalarNode, items_of
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.links import Edge, End, join_edges, link_to_itself, missing_end
from ttlaunch.spec.topology.model import Link, Mesh, MeshId

_PORT = re.compile(r"([NESWZ])([0-9]{1,9})\Z", re.IGNORECASE)
_SIDES = {"N": "north edge", "E": "east edge", "S": "south edge", "W": "west edge", "Z": "Z side"}
_FORM = "`[[0, E0], [1, W0]]`"
_PAIR = 2


@dataclass(frozen=True)
class _Port:
    """A port of a mesh, with the device that has it."""

    name: str
    end: End

    @property
    def key(self) -> tuple[int, str]:
        return self.end.number, self.name

    def __str__(self) -> str:
        return f"{self.name} of mesh {self.end.number}"


@dataclass(frozen=True)
class _Cable:
    """A link as one of its two ends lists it."""

    here: _Port
    there: _Port
    span: Span

    @property
    def key(self) -> tuple[tuple[int, str], tuple[int, str]]:
        return self.here.key, self.there.key

    @property
    def reverse_key(self) -> tuple[tuple[int, str], tuple[int, str]]:
        return self.there.key, self.here.key


def parse_port_links(
    root: MapNode, meshes: Mapping[MeshId, Mesh], ports: Mapping[str, int], *, missing: set[int]
) -> tuple[list[Link], list[Diagnostic]]:
    """Read a `Graph` of ports. Ids of meshes that it names and that do not exist are added to `missing`."""
    found: list[Diagnostic] = []
    cables: dict[tuple[tuple[int, str], tuple[int, str]], _Cable] = {}
    taken: dict[tuple[int, str], _Cable] = {}
    for row in items_of(root.entries.get("Graph")):
        cable = _cable(row, meshes, ports)
        missing.update(_named_meshes(row) - meshes.keys())
        mistake = cable if isinstance(cable, Diagnostic) else _cable_problem(cable, cables.get(cable.key), taken)
        if isinstance(cable, _Cable) and mistake is None:
            cables[cable.key] = taken[cable.here.key] = cable
        found += [mistake] if mistake else []
    if not found:
        found = [_one_sided(cable) for cable in cables.values() if cable.reverse_key not in cables]
    # The file lists each cable at both ends; it counts only once.
    once = [cable for cable in cables.values() if cable.key < cable.reverse_key or cable.reverse_key not in cables]
    return join_edges(Edge((one.here.end, one.there.end), 1, one.span, policy="STRICT") for one in once), found


def _named_meshes(row: Node) -> set[MeshId]:
    ids = (next(iter(items_of(end)), None) for end in items_of(row))
    return {MeshId(node.value) for node in ids if isinstance(node, ScalarNode) and type(node.value) is int}


def _cable(row: Node, meshes: Mapping[MeshId, Mesh], ports: Mapping[str, int]) -> _Cable | Diagnostic:
    if not isinstance(row, ListNode) or len(row.items) != _PAIR:
        many = f"a list of {len(row.items)}" if isinstance(row, ListNode) else "no list"
        message = f"a link is {many}; {_FORM} was expected, as in the other links"
        return mistake_at(TOPOLOGY.wrong_value, message, row.span, label=f"expected {_FORM}")
    here = _port(row.items[0], meshes, ports)
    if isinstance(here, Diagnostic):
        return here
    there = _port(row.items[1], meshes, ports)
    return there if isinstance(there, Diagnostic) else _Cable(here, there, row.span)


def _port(node: Node, meshes: Mapping[MeshId, Mesh], ports: Mapping[str, int]) -> _Port | Diagnostic:
    values = items_of(node)
    mesh_id, word = (value.value if isinstance(value, ScalarNode) else None for value in (*values, None, None)[:_PAIR])
    match = _PORT.match(word) if isinstance(word, str) else None
    if len(values) != _PAIR or type(mesh_id) is not int or match is None:
        message = f"an end of a link is not a mesh and a port; {_FORM} was expected"
        expected = "expected a mesh and a port such as `[0, E0]`"
        return mistake_at(TOPOLOGY.wrong_value, message, node.span, label=expected)
    mesh = meshes.get(MeshId(mesh_id))
    if mesh is None:
        return missing_end("mesh", mesh_id, values[0].span)
    letter, number = match[1].upper(), int(match[2])
    device, most = _device(mesh, letter, number=number, ports=ports.get(letter, 0))
    if device is None:
        message = f"a link names port {shown(word)} of mesh {mesh_id}, whose {_SIDES[letter]} has {most}"
        expected = f"expected {letter}0 to {letter}{most - 1}" if most else "no port there"
        sums = f"{mesh.device_shape[0]} × {mesh.device_shape[1]} devices, {ports.get(letter, 0)} ports each"
        return mistake_at(codes.PORT_NUMBER, message, values[1].span, label=expected, other=(mesh.span, sums))
    return _Port(f"{letter}{number}", End("mesh", mesh_id, device, node.span))


def _device(mesh: Mesh, letter: str, *, number: int, ports: int) -> tuple[int | None, int]:
    """Return the device that has a port, None if the side has too few ports; and the number of ports of that side."""
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


def _cable_problem(cable: _Cable, known: _Cable | None, taken: Mapping[tuple[int, str], _Cable]) -> Diagnostic | None:
    here, there = cable.here, cable.there
    if here.end.number == there.end.number:
        return link_to_itself(there.end)
    if known:
        message = f"the link from {here} to {there} is given twice"
        return given_twice(codes.LINK_TWICE, message, cable.span, first=known.span)
    if here.key in taken:
        message, other = f"port {here} has two links", (taken[here.key].here.end.span, "the other is here")
        return mistake_at(codes.LINK_TWICE, message, here.end.span, label="one port has one cable", other=other)
    return None


def _one_sided(cable: _Cable) -> Diagnostic:
    message = f"the link from {cable.here} to {cable.there} is given in one direction only"
    (a, port_a), (b, port_b) = cable.reverse_key
    hint = f"add `[[{a}, {port_a}], [{b}, {port_b}]]`"
    return mistake_at(codes.ONE_SIDED_LINK, message, cable.span, label="its way back is missing", hint=hint)
