"""Where the numbers of channels stand on the lines of the SVG."""

from collections.abc import Sequence
from itertools import pairwise

from ttlaunch.draw.routes import Route
from ttlaunch.draw.scene import Scene
from ttlaunch.draw.svg_box import SMALL_CHARACTER, Point


def place_labels(scene: Scene, routes: Sequence[Route], paths: Sequence[Sequence[Point]]) -> list[str]:
    """The channels of each link on its line, where no other label and if possible no other line is."""
    taken: list[tuple[float, float, float, float]] = []
    text = []
    for route, points in zip(routes, paths, strict=True):
        word = str(scene.wires[route.wire].channels)
        half = len(word) * SMALL_CHARACTER / 2 + 3
        spots = [(x - half, y - 8, x + half, y + 8) for x, y in _candidates(points)]
        others = [other for other in paths if other is not points]
        free = [spot for spot in spots if not any(_overlap(spot, other) for other in taken)]
        clear = [spot for spot in free if not any(_hits(spot, other) for other in others)]
        left, top, right, bottom = (clear or free or spots)[0]
        taken.append((left, top, right, bottom))
        text.append(
            f'<rect class="page" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"/>'
            f'<text class="small middle" x="{(left + right) / 2:.1f}" y="{top + 12:.1f}">{word}</text>'
        )
    return text


def _candidates(points: Sequence[Point]) -> list[Point]:
    """Places on a line, the middle of its longest stretch first."""
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
    """Whether a line runs through a label."""
    return any(
        _overlap(spot, (min(a[0], b[0]) - 1, min(a[1], b[1]) - 1, max(a[0], b[0]) + 1, max(a[1], b[1]) + 1))
        for a, b in pairwise(points)
    )
