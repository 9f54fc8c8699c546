"""Draw curves, such as losses over steps: with Braille characters for a terminal, and as SVG.

The vertical axis follows one rule, so that small differences look small: it covers every value that is drawn, from the first on, and
never less than a tenth of the largest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ttlaunch.draw.style import STYLE
from ttlaunch.draw.svg_box import SMALL_CHARACTER, svg_text

Point = tuple[float, float]

_LEAST_SHARE = 0.1
"""The least span of the vertical axis, as a share of the largest value."""
_TICKS = 4
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a Braille character's dots: left and right column, from top to bottom."""
_BRAILLE = 0x2800
_ROUND = 1e-9

_WIDTH, _HEIGHT, _LEFT, _TOP, _BETWEEN, _MARGIN, _LINE = 300, 220, 52, 96, 34, 20, 17
_COLOURS = ("#2f6fd0", "#d9730d", "#2e9e4f", "#8e4ec6", "#d6336c", "#0c8599")
_DASHES = ("", "6 3", "2 3")
_STYLE = f"{STYLE}.curve{{fill:none;stroke-width:1.6;stroke-linejoin:round}}.grid{{stroke:#8b949e;stroke-opacity:.3}}.band{{fill-opacity:.18}}"


@dataclass(frozen=True)
class Curve:
    """Points in the order of their horizontal positions.

    Attributes:
        name: The name in the legend.
        points: Positions and values.
        band: For some positions the least and the most of several values, such as those of repeats.
        is_dots: Whether the points are drawn as separate dots, without a line between them.
    """

    name: str
    points: tuple[Point, ...]
    band: tuple[tuple[float, float, float], ...] = ()
    is_dots: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over one horizontal axis, which begins at 0.

    Attributes:
        title: What the horizontal axis counts.
    """

    title: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Axis:
    """The two ends of an axis and the round numbers that are written beside it."""

    least: float
    most: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Return where a value lies: 0 at the axis's beginning, 1 at its end."""
        return (value - self.least) / (self.most - self.least)


def value_axis(values: Sequence[float]) -> Axis:
    """Choose the axis of values by the rule of this module, with ends that are round numbers."""
    least, most = (min(values), max(values)) if values else (0.0, 1.0)
    wanted = max(abs(least), abs(most)) * _LEAST_SHARE or 1.0
    if most - least < wanted:
        middle = (least + most) / 2
        least, most = middle - wanted / 2, middle + wanted / 2
    return _axis(least, most)


def _axis(least: float, most: float) -> Axis:
    """Widen a range to multiples of 1, 2 or 5 times a power of ten, about `_TICKS` of them."""
    rough = (most - least) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    tick = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - _ROUND))
    first, last = math.floor(least / tick + _ROUND), math.ceil(most / tick - _ROUND)
    return Axis(first * tick, last * tick, tuple(number * tick for number in range(first, last + 1)))


def _axes(chart: Chart) -> tuple[Axis, Axis]:
    points = [point for curve in chart.curves for point in curve.points]
    spread = [value for curve in chart.curves for _, least, most in curve.band for value in (least, most)]
    end = max((x for x, _ in points), default=0.0)
    return _axis(0.0, end or 1.0), value_axis([y for _, y in points] + spread)


def _number(value: float, axis: Axis) -> str:
    """Write a tick with as many decimals as neighbouring ticks need to differ."""
    distance = axis.ticks[1] - axis.ticks[0]
    return f"{value:,.{max(0, -math.floor(math.log10(distance) + _ROUND))}f}"


def render_chart_text(chart: Chart, *, width: int, height: int, plain: bool = False) -> list[str]:
    """Draw a chart for a terminal: lines of Braille dots, and `o` for separate dots.

    Args:
        chart: What to draw.
        width: The width in characters, with the numbers of the axis.
        height: The height in lines, without the two lines of the horizontal axis.
        plain: Whether to draw with ASCII characters alone.
    """
    across, up = _axes(chart)
    labels = {round((1 - up.share(tick)) * (height - 1)): _number(tick, up) for tick in up.ticks}
    margin = max(map(len, labels.values()))
    columns = max(8, width - margin - 2)
    cells = [[0] * columns for _ in range(height)]
    marks: dict[tuple[int, int], str] = {}

    def place(point: Point) -> tuple[float, float]:
        return across.share(point[0]) * (2 * columns - 1), (1 - up.share(point[1])) * (4 * height - 1)

    for curve in chart.curves:
        found = [place(point) for point in curve.points]
        if curve.is_dots:
            marks |= {(round(y) // 4, round(x) // 2): "o" for x, y in found}
            continue
        for before, after in zip(found, found[1:] or found, strict=False):
            _draw_line(cells, before, after)
    edge, corner, line = ("|", "+", "-") if plain else ("┤", "└", "─")
    lines = [
        f"{labels.get(row, ''):>{margin}} {edge}"
        + "".join(_cell(dots, marks.get((row, at)), plain=plain) for at, dots in enumerate(cells[row]))
        for row in range(height)
    ]
    end = _number(across.most, across)
    middle = max(0, columns - len(end) - 1)
    return [
        *(text.rstrip() for text in lines),
        f"{'':{margin}} {corner}{line * columns}",
        f"{'':{margin}}  0{chart.title.center(middle)}{end}".rstrip(),
    ]  # fmt: skip


def _draw_line(cells: list[list[int]], before: Point, after: Point) -> None:
    """Set the dots between two points, which are given in dots from the upper left corner."""
    (x0, y0), (x1, y1) = before, after
    steps = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
    for number in range(steps + 1):
        x, y = round(x0 + (x1 - x0) * number / steps), round(y0 + (y1 - y0) * number / steps)
        cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]


def _cell(dots: int, mark: str | None, *, plain: bool) -> str:
    if mark or not dots:
        return mark or " "
    return "*" if plain else chr(_BRAILLE + dots)


def render_charts_svg(title: str, charts: Sequence[Chart], *, note: str) -> str:
    """Draw charts side by side as SVG, with one legend: a curve has the same place and colour in every chart.

    Args:
        title: The title of the picture.
        charts: The charts from left to right, each with the same curves.
        note: The subtitle.
    """
    names = [curve.name for curve in charts[0].curves] if charts else []
    width = 2 * _MARGIN + len(charts) * (_LEFT + _WIDTH) + (len(charts) - 1) * _BETWEEN
    width = max(width, 2 * _MARGIN + round(max(map(len, (note, *names))) * SMALL_CHARACTER) + _LEFT)
    below = _TOP + _HEIGHT + 56
    height = below + len(names) * _LINE + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{svg_text(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="heading" x="{_MARGIN}" y="36">{svg_text(title)}</text>',
        f'<text class="quiet" x="{_MARGIN}" y="58">{svg_text(note)}</text>',
    ]
    for number, chart in enumerate(charts):
        parts += _chart(chart, x=_MARGIN + _LEFT + number * (_LEFT + _WIDTH + _BETWEEN))
    for number, name in enumerate(names):
        y = below + number * _LINE
        parts.append(
            _mark(charts[0].curves[number], number, ((_MARGIN, y - 4.0), (_MARGIN + 30.0, y - 4.0)))
            + f'<text x="{_MARGIN + 40}" y="{y}">{svg_text(name)}</text>'
        )
    return "".join(parts) + "</svg>\n"


def _chart(chart: Chart, *, x: float) -> list[str]:
    """Draw one chart whose plot begins at `x`."""
    across, up = _axes(chart)

    def place(point: Point) -> Point:
        return x + across.share(point[0]) * _WIDTH, _TOP + (1 - up.share(point[1])) * _HEIGHT

    parts = [
        f'<text class="quiet middle" x="{x + _WIDTH / 2:.1f}" y="{_TOP + _HEIGHT + 34}">{svg_text(chart.title)}</text>'
    ]
    for tick in up.ticks:
        y = place((0.0, tick))[1]
        parts.append(f'<path class="grid" d="M{x:.1f} {y:.1f}h{_WIDTH}"/>')
        parts.append(f'<text class="quiet end" x="{x - 6:.1f}" y="{y + 4:.1f}">{_number(tick, up)}</text>')
    for tick in across.ticks:
        at = place((tick, 0.0))[0]
        parts.append(
            f'<text class="quiet middle" x="{at:.1f}" y="{_TOP + _HEIGHT + 16}">{_number(tick, across)}</text>'
        )
    for number, curve in enumerate(chart.curves):
        parts += _band(curve, number, place)
        parts.append(_mark(curve, number, [place(point) for point in curve.points]))
    return parts  # fmt: skip


def _band(curve: Curve, number: int, place: Callable[[Point], Point]) -> list[str]:
    """Draw the area between the least and the most values; nothing if all are equal."""
    if all(least == most for _, least, most in curve.band):
        return []
    edge = [place((x, most)) for x, _, most in curve.band] + [place((x, least)) for x, least, _ in reversed(curve.band)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in edge)
    return [f'<path class="band" fill="{_COLOURS[number % len(_COLOURS)]}" d="M{path}z"/>']


def _mark(curve: Curve, number: int, points: Sequence[Point]) -> str:
    """Draw the line of a curve, or its separate dots; more curves than colours are told apart by dashes."""
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
    if curve.is_dots:
        return "".join(f'<circle fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="curve" stroke="{colour}" stroke-dasharray="{dash}" d="M{path}"/>' if points else ""
