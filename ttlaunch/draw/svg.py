"""Draw a scene as a self-contained SVG: readable on light and dark pages, text that can be selected, nothing loaded.

Boxes of one size stand on the grid that `grid.py` chose, and links run where `routes.py` leads them. Hovering over a box
or a link names it, and so does a screen reader.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ttlaunch.diagnostics.count import counted
from ttlaunch.draw.grid import Cell, columns_for, place_boxes
from ttlaunch.draw.routes import Port, Route, Routing, route_links
from ttlaunch.draw.scene import Scene
from ttlaunch.draw.style import STYLE
from ttlaunch.draw.svg_box import SMALL_CHARACTER, Point, box_size, render_box, svg_text

_MARGIN, _HEADER, _FOOTER = 32, 74, 44
_GUTTER, _LANE, _LABEL = 44, 14, 28


def render_svg(scene: Scene) -> str:
    """Write the picture as an SVG file."""
    cells = place_boxes(scene, columns=columns_for(len(scene.boxes), most=12))
    page = _lay_out(scene, cells)
    paths = [_points(route, page) for route in page.routing.routes]
    labels = [] if scene.channels is not None else place_labels(scene, page.routing.routes, paths)
    description = f"{scene.title}: {scene.subtitle}"
    size = f'width="{page.width:.0f}" height="{page.height:.0f}"'
    view = f'viewBox="0 0 {page.width:.0f} {page.height:.0f}" role="img" aria-labelledby="title description"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view}>',
        f'<title id="title">{svg_text(scene.title)}</title>',
        f'<desc id="description">{svg_text(description)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" {size}/>',
        f'<text class="heading" x="{_MARGIN}" y="44">{svg_text(scene.title)}</text>',
        f'<text class="quiet" x="{_MARGIN}" y="66">{svg_text(scene.subtitle)}</text>',
        *(_wire(scene, route, points) for route, points in zip(page.routing.routes, paths, strict=True)),
        *(
            render_box(scene, box, page.corner(cell), size=page.box)
            for box, cell in zip(scene.boxes, cells, strict=True)
        ),
        *labels,
        *_legend(scene, page.height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class _Page:
    """The layout of a picture, in pixels.

    Attributes:
        box: Width and height of every box.
        lefts: The left edge of each column of boxes.
        tops: The upper edge of each row of boxes.
    """

    width: float
    height: float
    box: tuple[float, float]
    lefts: list[float]
    tops: list[float]
    routing: Routing

    def corner(self, cell: Cell) -> Point:
        return self.lefts[cell[1]], self.tops[cell[0]]

    def port(self, port: Port) -> Point:
        (x, y), (width, height) = self.corner(port.cell), self.box
        if port.side in "NS":
            return x + width * (0.06 + 0.88 * port.along), y + (height if port.side == "S" else 0)
        return x + (width if port.side == "E" else 0), y + height * (0.06 + 0.88 * port.along)

    def lane(self, gutter: int, number: int, *, horizontal: bool) -> float:
        """Return the coordinate of a lane across its gutter; lanes are spread around the middle of the gutter."""
        edges, size = (self.tops, self.box[1]) if horizontal else (self.lefts, self.box[0])
        count = (self.routing.row_lanes if horizontal else self.routing.column_lanes)[gutter]
        if gutter == 0:
            return edges[0] - _LANE * (count - number)
        if gutter == len(edges):
            return edges[-1] + size + _LANE * (number + 1)
        middle = (edges[gutter - 1] + size + edges[gutter]) / 2
        return middle + _LANE * (number - (count - 1) / 2)


def _lay_out(scene: Scene, cells: Sequence[Cell]) -> _Page:
    routing = route_links(scene, cells)
    size = box_size(scene)
    room = 0 if scene.channels is not None else _LABEL
    lefts, width = _edges(routing.column_lanes, size[0], start=_MARGIN, room=room)
    tops, height = _edges(routing.row_lanes, size[1], start=_HEADER + 18, room=room)
    foot = _FOOTER + (18 if scene.wires else 0)
    title = max(len(scene.title) * 12.0, len(scene.subtitle) * SMALL_CHARACTER + 12)
    return _Page(max(width + _MARGIN, title + 2 * _MARGIN), height + foot, size, lefts, tops, routing)


def _edges(lanes: Sequence[int], size: float, *, start: float, room: float) -> tuple[list[float], float]:
    """Return where each row or column of boxes begins, and where the last gutter ends."""
    edges, position = [], start + (lanes[0] * _LANE + 4 if lanes[0] else 0)
    for count in lanes[1:]:
        edges.append(position)
        position += size + max(_GUTTER, (count + 1) * _LANE + (room if count else 0))
    return edges, edges[-1] + size + (lanes[-1] * _LANE + 4 if lanes[-1] else 0)


def _points(route: Route, page: _Page) -> list[Point]:
    """Return the corners of a link's line."""
    (x1, y1), (x2, y2) = page.port(route.start), page.port(route.end)
    if not route.lanes:
        return [(x1, y1), (x2, y2)]
    lane = route.lanes[0]
    first = page.lane(lane.gutter, lane.number, horizontal=lane.horizontal)
    if len(route.lanes) == 1:
        corners = [(x1, first), (x2, first)] if lane.horizontal else [(first, y1), (first, y2)]
        return [(x1, y1), *corners, (x2, y2)]
    second = page.lane(route.lanes[1].gutter, route.lanes[1].number, horizontal=False)
    return [(x1, y1), (x1, first), (second, first), (second, y2), (x2, y2)]


def _wire(scene: Scene, route: Route, points: Sequence[Point]) -> str:
    wire = scene.wires[route.wire]
    names = f"{scene.boxes[wire.a].name} – {scene.boxes[wire.b].name}: {counted(wire.channels, 'channel')}"
    width = 1.25 + 0.375 * min(wire.channels, 6)
    path = _rounded(points)
    return f'<g><title>{svg_text(names)}</title><path class="link" stroke-width="{width:g}" d="{path}"/></g>'


def _rounded(points: Sequence[Point], radius: float = 6) -> str:
    """Draw a line through the corners, each rounded as far as the lengths beside it allow."""
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        enter, leave = _towards(corner, before, radius), _towards(corner, after, radius)
        parts.append(f"L{enter[0]:.1f} {enter[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {leave[0]:.1f} {leave[1]:.1f}")
    return "".join(parts) + f"L{points[-1][0]:.1f} {points[-1][1]:.1f}"


def _towards(start: Point, goal: Point, distance: float) -> Point:
    dx, dy = goal[0] - start[0], goal[1] - start[1]
    length = max(abs(dx), abs(dy)) or 1.0
    share = min(distance, length / 2) / length
    return start[0] + dx * share, start[1] + dy * share


def _legend(scene: Scene, height: float) -> list[str]:
    if not scene.wires:
        return []
    same = scene.channels
    text = f"every link has {counted(same, 'ethernet channel')}" if same else "numbers on links: ethernet channels"
    return [f'<text class="quiet" x="{_MARGIN}" y="{height - 22:.1f}">{text}</text>']


def place_labels(scene: Scene, routes: Sequence[Route], paths: Sequence[Sequence[Point]]) -> list[str]:
    """Write the channels of each link on its line, where no other label is and, if possible, no other line."""
    taken: list[tuple[float, float, float, float]] = []
    text = []
    for route, points in zip(routes, paths, strict=True):
        label = str(scene.wires[route.wire].channels)
        half = len(label) * SMALL_CHARACTER / 2 + 3
        spots = [(x - half, y - 8, x + half, y + 8) for x, y in _candidates(points)]
        others = [other for other in paths if other is not points]
        free = [spot for spot in spots if not any(_overlap(spot, other) for other in taken)]
        clear = [spot for spot in free if not any(_hits(spot, other) for other in others)]
        left, top, right, bottom = (clear or free or spots)[0]
        taken.append((left, top, right, bottom))
        text.append(
            f'<rect class="page" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"/>'
            f'<text class="small middle" x="{(left + right) / 2:.1f}" y="{top + 12:.1f}">{label}</text>'
        )
    return text


def _candidates(points: Sequence[Point]) -> list[Point]:
    """Return possible places for a label on a line, the middle of its longest stretch first."""
    sides = sorted(pairwise(points), key=lambda side: -_length(*side))
    return [
        (a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share)
        for a, b in sides
        if _length(a, b) > 20  # noqa: PLR2004 - room for a label
        for share in (0.5, 0.35, 0.65, 0.2, 0.8, 0.15, 0.85)
    ] or [((points[0][0] + points[-1][0]) / 2, (points[0][1] + points[-1][1]) / 2)]


def _length(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _hits(spot: tuple[float, float, float, float], points: Sequence[Point]) -> bool:
    """Return whether a line runs through a label."""
    return any(
        _overlap(spot, (min(a[0], b[0]) - 1, min(a[1], b[1]) - 1, max(a[0], b[0]) + 1, max(a[1], b[1]) + 1))
        for a, b in pairwise(points)
    )
