"""Write a mesh graph as a descriptor of version 2: a descriptor for each kind of mesh, a connection for each link.

The text is made from the schema: the fields that were set, in the order of the schema, short groups on one line.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from ttlaunch.spec.located.schema import Section
from ttlaunch.spec.topology.mesh_graph import MeshGraph
from ttlaunch.spec.topology.mgd_schema import (
    Channels,
    Connection,
    DescriptorFile,
    DeviceTopology,
    GraphDescriptor,
    GraphRef,
    HostTopology,
    MeshDescriptor,
    MeshRef,
    NodeRef,
)
from ttlaunch.spec.topology.model import Link, Mesh, MeshId

_LONGEST_LINE = 100
_INDENT = "  "
_ALWAYS_OPEN = {"connections"}


def textproto_of(graph: MeshGraph) -> tuple[DescriptorFile, list[str]]:
    """Return the file to write, and notes on what it cannot express; the graph is one of version 1 without mistakes."""
    notes: list[str] = []
    names = _names(graph, notes)
    ports = graph.ports or {}
    if not ports.get("N", 1):
        notes.append("version 2 cannot express that chips have no ethernet ports; `count: 1` was written")
    if ports.get("Z"):
        notes.append(f"version 2 does not say how many ports a chip has to the Z side ({ports['Z']})")
    kinds = {names[mesh.id]: mesh for mesh in reversed(graph.meshes)}
    rows = [_descriptor(name, mesh, graph.arch) for name, mesh in reversed(kinds.items())]
    if len(graph.meshes) == 1 and graph.meshes[0].id == 0:
        top = NodeRef(mesh=_ref(graph.meshes[0], names))
        return DescriptorFile(mesh_descriptors=rows, top_level_instance=top), notes
    meshes = {mesh.id: mesh for mesh in graph.meshes}
    connections = [connection for link in graph.links for connection in _connections(link, meshes, names)]
    instances = [NodeRef(mesh=_ref(mesh, names)) for mesh in graph.meshes]
    whole = GraphDescriptor(name=graph.name, type="FABRIC", instances=instances, connections=connections)
    top = NodeRef(graph=GraphRef(graph_descriptor=graph.name, graph_id=0))
    return DescriptorFile(mesh_descriptors=rows, graph_descriptors=[whole], top_level_instance=top), notes


def _names(graph: MeshGraph, notes: list[str]) -> dict[int, str]:
    """Name the descriptor of each mesh like its board, with a number if meshes of one board differ."""
    kinds: dict[tuple[str, tuple[int, int], tuple[int, int]], str] = {}
    taken = {mesh.board for mesh in graph.meshes}
    used: set[str] = set()
    for mesh in graph.meshes:
        kind = (mesh.board, mesh.device_shape, mesh.host_shape)
        if kind in kinds:
            continue
        name, number = mesh.board, 2
        while name in used or (name != mesh.board and name in taken):
            name, number = f"{mesh.board}_{number}", number + 1
        if name != mesh.board:
            notes.append(f"board `{mesh.board}` has meshes of different shapes; one of them is called `{name}`")
        used.add(name)
        kinds[kind] = name
    return {mesh.id: kinds[mesh.board, mesh.device_shape, mesh.host_shape] for mesh in graph.meshes}


def _descriptor(name: str, mesh: Mesh, arch: str) -> MeshDescriptor:
    devices: dict[str, object] = {"dims": list(mesh.device_shape)}
    if mesh.dim_types != ("LINE", "LINE"):
        devices["dim_types"] = list(mesh.dim_types)
    return MeshDescriptor.model_validate(
        {
            "name": name,
            "arch": arch.upper(),
            "device_topology": DeviceTopology.model_validate(devices),
            "host_topology": HostTopology(dims=list(mesh.host_shape)),
            "channels": Channels.model_validate({"count": max(1, mesh.channels), "policy": mesh.policy}),
        }
    )


def _ref(mesh: Mesh, names: dict[int, str], device: int | None = None) -> MeshRef:
    name = names[mesh.id]
    if device is None:
        return MeshRef(mesh_descriptor=name, mesh_id=mesh.id)
    return MeshRef(mesh_descriptor=name, mesh_id=mesh.id, device_id=device)


def _connections(link: Link, meshes: Mapping[MeshId, Mesh], names: dict[int, str]) -> list[Connection]:
    a, b = meshes[link.a], meshes[link.b]
    rows: list[tuple[int | None, int | None, int]] = [*link.devices] or [(None, None, link.channels)]
    return [
        Connection(
            nodes=[NodeRef(mesh=_ref(a, names, here)), NodeRef(mesh=_ref(b, names, there))],
            channels=Channels.model_validate({"count": count, "policy": link.policy}),
        )
        for here, there, count in rows
    ]


def write_textproto(message: Section) -> str:
    """Write the fields of a message, with an empty line between groups of several lines."""
    text = ""
    for line in _fields(message, ""):
        text += line + "\n"
    return text


def _fields(message: Section, indent: str) -> list[str]:
    lines: list[str] = []
    for name, field in type(message).model_fields.items():
        value = getattr(message, name)
        if name not in message.model_fields_set or value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if values and not isinstance(values[0], Section):
            is_word = _is_word(field.annotation)
            written = [_scalar(item, is_word=is_word) for item in values]
            lines.append(f"{indent}{name}: " + (f"[{', '.join(written)}]" if isinstance(value, list) else written[0]))
            continue
        for item in values:
            lines += _group(name, item, indent)
    return lines


def _group(name: str, message: Section, indent: str) -> list[str]:
    inner = _fields(message, indent + _INDENT)
    line = f"{indent}{name} {{ {' '.join(part.strip() for part in inner)} }}"
    if not indent and len(inner) > 1 and name != "top_level_instance":
        return [f"{name} {{", *inner, "}"]
    if len(line) <= _LONGEST_LINE and name not in _ALWAYS_OPEN:
        return [line]
    return [f"{indent}{name} {{", *inner, f"{indent}}}"]


def _scalar(value: Any, *, is_word: bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str) or is_word:
        return str(value)
    return '"' + "".join(_escaped(character) for character in value) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", errors="replace"))


def _is_word(annotation: Any) -> bool:
    return get_origin(annotation) is Literal or any(_is_word(part) for part in get_args(annotation) if part is not None)
