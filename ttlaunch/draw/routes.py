"""Route links between boxes on a grid: straight to a neighbour, otherwise in lanes of the gutters between boxes.

No line crosses a box, and no two lines run on top of each other: where several links use a gutter, each has a lane of
its own, and where several end at one side of a box, each has a port of its own. Lines may cross at right angles.

Gutter `k` is the one before row or column `k`. Coordinates along a gutter are on a scale on which row or column `k`
extends from `k + 0.1` to `k + 0.9`, so that lanes can be assigned before the size of rows in pixels is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ttlaunch.draw.grid import Cell
from ttlaunch.draw.scene import Scene

_EDGE = 0.08  # room that stays free at each end of a lane


@dataclass
class Port:
    """Where a link leaves a box.

    Attributes:
        side: `N`, `E`, `S` or `W`.
        towards: Where the link leads to; the ports of a side are sorted by it.
        along: Place on that side, from 0 to 1.
    """

    cell: Cell
    side: str
    towards: float
    along: float = 0.5


@dataclass
class Lane:
    """The stretch of a gutter that a link uses.

    Attributes:
        horizontal: Whether the gutter lies between rows.
        ends: Where the stretch begins and ends, on the scale of the module's docstring.
        number: Which of the gutter's parallel lanes it is; stretches that do not overlap share a number.
    """

    horizontal: bool
    gutter: int
    ends: tuple[float, float] = (0.0, 0.0)
    number: int = 0


@dataclass
class Route:
    """The route of one link: out of a port, through none, one or two lanes, into another port."""

    wire: int
    start: Port
    end: Port
    lanes: list[Lane] = field(default_factory=list)


@dataclass(frozen=True)
class Routing:
    """All routes, and how many lanes each gutter needs."""

    routes: list[Route]
    row_lanes: list[int]
    column_lanes: list[int]


def route_links(scene: Scene, cells: Sequence[Cell]) -> Routing:
    """Find a route for every link of the scene; `cells` has the cell of each box."""
    rows, columns = 1 + max(row for row, _ in cells), 1 + max(column for _, column in cells)
    use = {(horizontal, k): 0 for horizontal in (True, False) for k in range(max(rows, columns) + 1)}
    routes = [_route(number, cells[wire.a], cells[wire.b], use=use) for number, wire in enumerate(scene.wires)]
    # Ports before lanes: how far a lane reaches follows from where its route leaves the boxes.
    _share_ports(routes)
    for route in routes:
        _measure(route)
    return Routing(
        routes,
        [_share_lanes(routes, horizontal=True, gutter=k) for k in range(rows + 1)],
        [_share_lanes(routes, horizontal=False, gutter=k) for k in range(columns + 1)],
    )


def _route(number: int, a: Cell, b: Cell, *, use: dict[tuple[bool, int], int]) -> Route:
    """Choose ports and lanes for a link; `use` counts the lanes of each gutter, so that the emptier one is chosen."""
    (r1, c1), (r2, c2) = a, b = min(a, b), max(a, b)
    if r1 == r2 and c2 == c1 + 1:
        return Route(number, Port(a, "E", r1), Port(b, "W", r1))
    if c1 == c2 and r2 == r1 + 1:
        return Route(number, Port(a, "S", c1), Port(b, "N", c1))
    if r1 == r2:
        gutter = min((r1 + 1, r1), key=lambda k: use[True, k])
        side = "S" if gutter > r1 else "N"
        lanes, ports = [Lane(True, gutter)], (Port(a, side, c2), Port(b, side, c1))  # noqa: FBT003 - as named
    elif c1 == c2:
        gutter = min((c1 + 1, c1), key=lambda k: use[False, k])
        side = "E" if gutter > c1 else "W"
        lanes, ports = [Lane(False, gutter)], (Port(a, side, r2), Port(b, side, r1))  # noqa: FBT003
    elif r2 == r1 + 1:
        lanes, ports = [Lane(True, r2)], (Port(a, "S", c2), Port(b, "N", c1))  # noqa: FBT003
    else:
        near = c2 if c1 < c2 else c2 + 1
        lanes = [Lane(True, r1 + 1), Lane(False, near)]  # noqa: FBT003
        ports = (Port(a, "S", near - 0.5), Port(b, "W" if c1 < c2 else "E", r1))
    for lane in lanes:
        use[lane.horizontal, lane.gutter] += 1
    return Route(number, *ports, lanes)


def _share_ports(routes: Sequence[Route]) -> None:
    """Give each port its own place; the two sides that face each other across a gutter share one set of places."""
    facing: dict[tuple[bool, int, int], list[Port]] = {}
    straight = set()
    for route in routes:
        for port in (route.start, route.end):
            row, column = port.cell
            vertical = port.side in "NS"
            gutter = (row if vertical else column) + (1 if port.side in "SE" else 0)
            place = (vertical, gutter, column if vertical else row)
            if route.lanes:
                facing.setdefault(place, []).append(port)
            else:
                straight.add(place)
    for place, ports in facing.items():
        ports.sort(key=lambda port: (port.towards, port.side))
        # The middle belongs to the straight link, if there is one.
        count = len(ports) + (1 if place in straight else 0)
        spots = [(number + 1) / (count + 1) for number in range(count)]
        if place in straight:
            middle = min(spots, key=lambda spot: abs(spot - 0.5))
            left = [0.5 * (number + 1) / (spots.index(middle) + 1) for number in range(spots.index(middle))]
            after = count - spots.index(middle) - 1
            spots = left + [0.5 + 0.5 * (number + 1) / (after + 1) for number in range(after)]
        for port, spot in zip(ports, spots, strict=True):
            port.along = spot


def _measure(route: Route) -> None:
    """Set where each lane of a route begins and ends."""
    at_start, at_end = _along(route.start), _along(route.end)
    if len(route.lanes) == 1:
        route.lanes[0].ends = (min(at_start, at_end), max(at_start, at_end))
    elif route.lanes:
        across, down = route.lanes
        across.ends = (min(at_start, down.gutter), max(at_start, down.gutter))
        down.ends = (min(across.gutter, at_end), max(across.gutter, at_end))


def _along(port: Port) -> float:
    """Return the coordinate of a port on the scale of the gutter that it opens into."""
    row, column = port.cell
    return (column if port.side in "NS" else row) + 0.1 + 0.8 * port.along


def _share_lanes(routes: Sequence[Route], *, horizontal: bool, gutter: int) -> int:
    """Number the lanes of a gutter so that stretches with one number do not overlap; return how many numbers it takes."""
    here = [lane for route in routes for lane in route.lanes if (lane.horizontal, lane.gutter) == (horizontal, gutter)]
    free_from: list[float] = []
    for lane in sorted(here, key=lambda lane: lane.ends):
        begin, end = lane.ends[0] - _EDGE, lane.ends[1] + _EDGE
        lane.number = next((n for n, free in enumerate(free_from) if free <= begin), len(free_from))
        free_from[lane.number : lane.number + 1] = [end]
    return len(free_from)
