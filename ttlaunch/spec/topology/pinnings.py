"""Check the pinnings of a descriptor of version 2: devices of a mesh that exists, each at one place, each place once."""

import re
from collections.abc import Iterator, Mapping, Sequence

from ttlaunch.diagnostics.diagnostic import Diagnostic, Label
from ttlaunch.diagnostics.span import Span
from ttlaunch.spec.located.nodes import Key, MapNode, span_of
from ttlaunch.spec.topology import codes
from ttlaunch.spec.topology.mgd_schema import LogicalNode, PhysicalPosition, Pinning
from ttlaunch.spec.topology.model import Mesh

_LONGEST_PATTERN = 1000
_PATTERN = re.compile(r"[0-9A-Za-z\[\]{}()|.*+?^$\\, -]+\Z")


def check_pinnings(rows: Sequence[Pinning], root: MapNode, meshes: Mapping[int, Mesh]) -> Iterator[Diagnostic]:
    """All mistakes in them."""
    taken: dict[tuple[int, int, str | None], Span] = {}
    for index, row in enumerate(rows):
        for number, node in enumerate(row.logical_fabric_node_id):
            path: tuple[Key, ...] = ("pinnings", index, "logical_fabric_node_id", number)
            yield from _check_choice(node, ("mesh_id", "chip_id"), root, path)
            yield from _check_node(node, root, path, meshes)
            if node.mesh_id is None or node.chip_id is None:
                continue
            key, span = (node.mesh_id, node.chip_id, row.board_revision), span_of(root, (*path, "chip_id"))
            if key in taken:
                message = f"device {node.chip_id} of mesh {node.mesh_id} is pinned twice"
                labels = (Label(taken[key], "first pinned here"),)
                yield Diagnostic(codes.PINNED_TWICE, message, Label(span, "and again here"), labels)
            taken.setdefault(key, span)
        for number, place in enumerate(row.physical_asic_position):
            path = ("pinnings", index, "physical_asic_position", number)
            yield from _check_choice(place, ("tray_id", "asic_location"), root, path)


def _check_choice(
    node: LogicalNode | PhysicalPosition, keys: tuple[str, str], root: MapNode, path: tuple[Key, ...]
) -> Iterator[Diagnostic]:
    """Of a number and the pattern for it exactly one is given, and the pattern is one."""
    for key in keys:
        pattern = getattr(node, f"{key}_regex")
        if (getattr(node, key) is None) == (pattern is None):
            many = "neither" if pattern is None else "both"
            message = f"a pinning has {many} of `{key}` and `{key}_regex`; one of them was expected"
            place = path if pattern is None else (*path, f"{key}_regex")
            yield Diagnostic(codes.WRONG_VALUE, message, Label(span_of(root, place)))
        elif pattern is not None and (len(pattern) > _LONGEST_PATTERN or not _PATTERN.match(pattern)):
            message = f"`{key}_regex` is no pattern of numbers"
            yield Diagnostic(
                codes.WRONG_VALUE, message, Label(span_of(root, (*path, f"{key}_regex")), 'expected such as "0-3,8"')
            )


def _check_node(
    node: LogicalNode, root: MapNode, path: tuple[Key, ...], meshes: Mapping[int, Mesh]
) -> Iterator[Diagnostic]:
    mesh = meshes.get(node.mesh_id) if node.mesh_id is not None else None
    if node.mesh_id is not None and mesh is None:
        message = f"a pinning names mesh {node.mesh_id}, which does not exist"
        label = Label(span_of(root, (*path, "mesh_id")), f"no mesh has id {node.mesh_id}")
        yield Diagnostic(codes.REFERENCE, message, label)
    if mesh is not None and node.chip_id is not None:
        count = mesh.device_shape[0] * mesh.device_shape[1]
        if node.chip_id >= count:
            message = f"a pinning names device {node.chip_id} of mesh {mesh.id}, which has {count} devices"
            label = Label(span_of(root, (*path, "chip_id")), f"expected 0 to {count - 1}")
            yield Diagnostic(codes.DEVICE_NUMBER, message, label)
