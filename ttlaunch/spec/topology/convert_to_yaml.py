"""Write a mesh graph as a descriptor of version 1, in the shape of release 0.64, with notes on what that cannot express."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from ttlaunch.diagnostics.suggest import listed
from ttlaunch.spec.topology.graph_rules import missing_z_ports
from ttlaunch.spec.topology.mesh_graph import MeshGraph, numbered
from ttlaunch.spec.topology.mgd_schema import DescriptorFile, MeshDescriptor, SwitchDescriptor
from ttlaunch.spec.topology.mgd_yaml import DIM_TYPES
from ttlaunch.spec.topology.model import Link

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf"}


def yaml_of(graph: MeshGraph, file: DescriptorFile | None) -> tuple[str, list[str]]:
    """Return the text to write, and notes on what it cannot express.

    Args:
        graph: A mesh graph of either version, without mistakes.
        file: The file as written if it is of version 2, otherwise None.
    """
    notes = _lost(graph, file) if file is not None else []
    ports = dict(graph.ports) if graph.ports is not None else _ports(graph, notes)
    types = {dim_types: name for name, dim_types in DIM_TYPES.items()}
    boards: dict[str, str] = {}
    names: dict[int, str] = {}
    for mesh in graph.meshes:
        rows, columns = (devices // hosts for devices, hosts in zip(mesh.device_shape, mesh.host_shape, strict=True))
        boards[mesh.board] = (
            f"{{name: {_text(mesh.board)}, type: {types[mesh.dim_types]}, topology: [{rows}, {columns}]}}"
        )
        names[mesh.id] = _text(mesh.board)
    meshes = [
        f"{{id: {mesh.id}, board: {names[mesh.id]}, device_topology: {list(mesh.device_shape)}, "
        f"host_topology: {list(mesh.host_shape)}}}"
        for mesh in graph.meshes
    ]
    key, links = _links(graph.links, notes)
    chip = ", ".join(f"{letter}: {count}" for letter, count in ports.items())
    text = f"ChipSpec: {{\n  arch: {graph.arch},\n  ethernet_ports: {{{chip}}}\n}}\n\n"
    text += f"Board: [\n{_lines(list(boards.values()))}]\n\nMesh: [\n{_lines(meshes)}]\n\n"
    return text + (f"{key}: [\n{_lines(links)}]\n" if links else f"{key}: []\n"), notes


def _lines(rows: list[str]) -> str:
    return "".join(f"  {row},\n" for row in rows)


def _text(name: str) -> str:
    plain = _PLAIN.match(name) and name.lower() not in _WORDS
    if plain:
        return name
    text = json.dumps(name, ensure_ascii=False)
    return "".join(character if character.isprintable() else f"\\U{ord(character):08x}" for character in text)


def _ports(graph: MeshGraph, notes: list[str]) -> dict[str, int]:
    """Return the ports of a chip: version 2 has only the channels between neighbours, so as many ports are assumed."""
    counts = sorted({mesh.channels for mesh in graph.meshes})
    if len(counts) > 1:
        what = listed(counts, last="and", quote="")
        notes.append(f"version 1 has one number of ports for all meshes; of {what} channels the largest was written")
    ports = dict.fromkeys("NESW", counts[-1])
    missing = missing_z_ports(replace(graph, ports=ports, links=_as_written(graph.links)))
    if missing:
        notes.append(f"the links need more ports than the edges of the meshes have; `Z: {missing}` was added")
        ports["Z"] = missing
    return ports


def _as_written(links: Sequence[Link]) -> list[Link]:
    """Return the links as version 1 can write them: all of them with devices, or none."""
    return list(links) if all(link.devices for link in links) else [replace(link, devices=()) for link in links]


def _links(links: Sequence[Link], notes: list[str]) -> tuple[str, list[str]]:
    # `Graph` and `RelaxedGraph` exclude each other, so one link without devices makes all of them links of meshes.
    rows = _as_written(links)
    if rows and rows[0].devices:
        if any(link.policy == "RELAXED" for link in rows):
            notes.append("version 1 has no RELAXED links of devices; they were written as STRICT ones")
        lines = [f"[[M{k.a}, D{a}], [M{k.b}, D{b}], {count}]" for k in rows for a, b, count in k.devices]
        return "Graph", lines
    if any(link.policy == "STRICT" for link in rows):
        notes.append("version 1 has no STRICT links of meshes; they were written as RELAXED ones")
    if any(link.devices for link in links):
        notes.append("version 1 takes links of devices only where all are; those were written as links of meshes")
    return "RelaxedGraph", [f"[M{link.a}, M{link.b}, {link.channels}]" for link in rows]


def _lost(graph: MeshGraph, file: DescriptorFile) -> list[str]:
    notes = []
    if any(mesh.policy == "RELAXED" for mesh in graph.meshes):
        notes.append("version 1 cannot express that the channels inside a mesh are RELAXED")
    if graph.switches:
        which = numbered("switch", "switches", sorted(switch.id for switch in graph.switches))
        whose = "its" if len(graph.switches) == 1 else "their"
        notes.append(f"version 1 has no switches; {which} and {whose} links were left out")
    if file.pinnings:
        notes.append("version 1 has no pinnings; they were left out")
    kinds: list[MeshDescriptor | SwitchDescriptor] = [*file.mesh_descriptors, *file.switch_descriptors]
    if any(row.express_links for row in kinds):
        notes.append("version 1 has no express links; they were left out")
    if any(link.uses_z for link in graph.links):
        notes.append("version 1 cannot express which links use the Z ports")
    used = {mesh.board for mesh in graph.meshes} | {switch.name for switch in graph.switches}
    unused = [row.name for row in kinds if row.name not in used]
    if unused:
        notes.append(f"descriptor {listed(unused, last='and')} has no instance and was left out")
    if any(row.routing_direction for graph_row in file.graph_descriptors for row in graph_row.connections):
        notes.append("version 1 has no routing directions for links of meshes; they were left out")
    return notes
