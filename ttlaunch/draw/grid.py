"""Arrange boxes in rows and columns so that most links join neighbours and lines are short."""

from math import ceil, isqrt

from ttlaunch.draw.scene import Scene
from ttlaunch.planning.arrangement import Assignment
from ttlaunch.planning.search import solve

_LOOKUPS = 200_000
_MOST_BOXES = 100

Cell = tuple[int, int]
"""Row and column, from 0."""


def columns_for(boxes: int, *, most: int) -> int:
    """Choose about as many columns as rows; up to three boxes stand in one row if they fit."""
    square = isqrt(boxes - 1) + 1 if boxes > 1 else 1
    return max(1, min(most, boxes if boxes <= 3 else square))  # noqa: PLR2004 - what fits beside each other


def place_boxes(scene: Scene, *, columns: int) -> list[Cell]:
    """Choose a cell for each box: row by row in the scene's order, unless another order has shorter links."""
    count = len(scene.boxes)
    cells = [divmod(number, columns) for number in range(ceil(count / columns) * columns)]
    if count > _MOST_BOXES or not scene.wires:
        return cells[:count]
    distances = [[_distance(a, b) for b in cells] for a in cells]
    traffic = {(min(wire.a, wire.b), max(wire.a, wire.b)): 1.0 for wire in scene.wires}
    places = solve(Assignment(distances, traffic, tuple((cell,) for cell in range(len(cells)))), lookups=_LOOKUPS)
    return [cells[places[box]] for box in range(count)]


def _distance(a: Cell, b: Cell) -> float:
    """Return how far apart two cells are: neighbours are joined by a straight line, others by one around boxes."""
    steps = abs(a[0] - b[0]) + abs(a[1] - b[1])
    return float(steps) if steps <= 1 else 2.5 + 0.25 * steps
