"""The picture of a run's cluster, as `ttlaunch show` draws it, for a page that builds elements and takes no markup."""

from __future__ import annotations  # the parser of records reads the names of kinds

from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from ttlaunch.draw.scene import Box, Occupant, Scene, Wire
from ttlaunch.draw.svg import render_svg
from ttlaunch.records.parser import BadRecord, Count, Rank, Word, read, record
from ttlaunch.running.runs.facts import CLUSTER_FILE
from ttlaunch.running.runs.files import read_file

_MOST_BOXES: Final = 64
_MOST_LINKS: Final = 512
_LONGEST: Final = 200
_SVG: Final = "{http://www.w3.org/2000/svg}"
_LEFT_OUT: Final = frozenset({"style", "desc"})


@record
class DrawnRank:
    """A rank on a box."""

    rank: Rank
    host: Word
    role: Word


@record
class DrawnBox:
    """A host, a mesh or a switch; see `draw.scene.Box`."""

    name: Word
    detail: Word
    shape: tuple[Count, Count] | None
    host_shape: tuple[Count, Count]
    occupants: tuple[DrawnRank, ...]
    hidden: Count


@record
class DrawnLink:
    """A link between two boxes, by their positions."""

    a: Count
    b: Count
    channels: Count


@record
class DrawnCluster:
    """The content of `cluster.json`."""

    title: Word
    subtitle: Word
    boxes: tuple[DrawnBox, ...]
    wires: tuple[DrawnLink, ...]
    roles: tuple[Word, ...]


def picture_as_json(path: Path) -> list[Any] | None:
    """Return the picture as nested lists of a name, attributes, and texts or such lists; None if the run has none that can be drawn."""
    data = read_file(path / CLUSTER_FILE)
    found = read(DrawnCluster, data) if data is not None else None
    scene = None if found is None or isinstance(found, BadRecord) else _scene(found)
    return None if scene is None else _as_lists(ET.fromstring(render_svg(scene)))  # noqa: S314 - our own markup, with every text escaped


def _scene(found: DrawnCluster) -> Scene | None:
    """Return the scene; None if it is too large for a picture, or its links lead to no box."""
    if not 0 < len(found.boxes) <= _MOST_BOXES or len(found.wires) > _MOST_LINKS:
        return None
    count = len(found.boxes)
    if any(max(wire.a, wire.b) >= count or wire.a == wire.b for wire in found.wires):
        return None
    if any(0 in one for box in found.boxes for one in (box.shape or (1, 1), box.host_shape)):
        return None
    boxes = [
        Box(
            name=box.name[:_LONGEST],
            detail=box.detail[:_LONGEST],
            shape=box.shape,
            host_shape=(
                min(box.host_shape[0], (box.shape or (1, 1))[0]),
                min(box.host_shape[1], (box.shape or (1, 1))[1]),
            ),
            occupants=tuple(Occupant(one.rank, one.host[:_LONGEST], one.role[:_LONGEST]) for one in box.occupants[:8]),
            hidden=box.hidden,
        )
        for box in found.boxes
    ]
    wires = tuple(Wire(wire.a, wire.b, wire.channels) for wire in found.wires)
    roles = tuple(role[:_LONGEST] for role in found.roles)
    return Scene(found.title[:_LONGEST], found.subtitle[:_LONGEST], tuple(boxes), wires, roles)


def _as_lists(element: ET.Element) -> list[Any]:
    inner = [element.text] if element.text and element.text.strip() else []
    children = [_as_lists(one) for one in element if one.tag.removeprefix(_SVG) not in _LEFT_OUT]
    return [element.tag.removeprefix(_SVG), dict(element.attrib), *inner, *children]
