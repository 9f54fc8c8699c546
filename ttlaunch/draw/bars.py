"""Draw measurements as SVG: a row for each candidate, a panel for each number, and the spread over repeats.

Numbers with a meaningful zero are bars that begin at zero. For other numbers only differences count: they are dots on an axis that
the caller chooses, whose ends are written below the panel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ttlaunch.draw.style import STYLE
from ttlaunch.draw.svg_box import SMALL_CHARACTER, svg_text

_LENGTH = 110
"""The length of the longest bar."""

_BAR, _DOT, _LINE, _MARGIN, _BETWEEN, _APART = 14, 4, 15, 20, 22, 10
_LEAST_WHISKER = 4.0
_TITLE_CHARACTER = 8.2
_LIGHT = ".bar{fill:#4a90d9}.row{fill:#f6f8fa}.whisker{stroke:#1f2328}"
_DARK = ".bar{fill:#3f7fca}.row{fill:#161b22}.whisker{stroke:#f0f6fc}"
_STYLE = f"{STYLE}.whisker{{fill:none}}{_LIGHT}@media(prefers-color-scheme:dark){{{_DARK}}}"


@dataclass(frozen=True)
class Measurement:
    """Median, minimum and maximum of repeats, and the median as text; if `median` is None, nothing was measured."""

    median: float | None
    least: float = 0.0
    most: float = 0.0
    text: str = "–"


@dataclass(frozen=True)
class Panel:
    """A column of the picture: one number for each row, in the order of the rows.

    Attributes:
        note: The unit, and whether a higher or a lower value is better.
        axis: The two ends of the axis on which values are drawn as dots; None for bars from 0.
        ends: The format of the numbers at the two ends of an axis.
    """

    title: str
    note: str
    measurements: tuple[Measurement, ...]
    axis: tuple[float, float] | None = None
    ends: str = "{:.2f}"


@dataclass(frozen=True)
class _Rows:
    """Where the rows of the picture are: the top and the height of each, and the bottom of the last."""

    tops: tuple[float, ...]
    heights: tuple[float, ...]
    bottom: float

    def middle(self, number: int) -> float:
        return self.tops[number] + self.heights[number] / 2


@dataclass(frozen=True)
class _Scale:
    """Converts values to positions in a panel that begins at `x`; `length` is the number of pixels per unit."""

    x: float
    least: float
    length: float

    def position_of(self, value: float) -> float:
        return self.x + (value - self.least) * self.length


def render_bars(title: str, names: Sequence[Sequence[str]], panels: Sequence[Panel], *, note: str) -> str:
    """Draw the whole picture; panels stand side by side, and each name has one row through all of them.

    Args:
        title: The title of the picture.
        names: The names of what was measured, each as one or several lines of text, the most important first.
        panels: The panels from left to right.
        note: The subtitle, about all numbers.
    """
    rows = _rows(names)
    left = _MARGIN + max((len(line) for lines in names for line in lines), default=0) * SMALL_CHARACTER + _BETWEEN
    widths = [_width(panel) for panel in panels]
    right = left + sum(widths) + _BETWEEN * (len(panels) - 1)
    width = max(right, _MARGIN + len(note) * SMALL_CHARACTER) + _MARGIN
    height = rows.bottom + _LINE + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">',
        f"<title>{svg_text(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
        f'<text class="heading" x="{_MARGIN}" y="36">{svg_text(title)}</text>',
        f'<text class="quiet" x="{_MARGIN}" y="56">{svg_text(note)}</text>',
    ]
    parts += _stripes(rows, x=_MARGIN / 2, width=right)
    for number, lines in enumerate(names):
        first = rows.middle(number) - (len(lines) - 1) * _LINE / 2 + 4
        for index, line in enumerate(lines):
            kind = "quiet" if index else "label"
            parts.append(f'<text class="{kind}" x="{_MARGIN}" y="{first + index * _LINE:.1f}">{svg_text(line)}</text>')
    for panel, panel_width in zip(panels, widths, strict=True):
        parts += _panel(panel, rows, x=left)
        left += panel_width + _BETWEEN
    return "".join(parts) + "</svg>\n"


def _rows(names: Sequence[Sequence[str]]) -> _Rows:
    heights = tuple(float(max(1, len(lines)) * _LINE + 9) for lines in names)
    tops, top = [], 116.0
    for height in heights:
        tops.append(top)
        top += height
    return _Rows(tuple(tops), heights, top)


def _stripes(rows: _Rows, *, x: float, width: float) -> list[str]:
    """Draw a background behind every other row, so that the eye can follow a row."""
    return [
        f'<rect class="row" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        for top, height in zip(rows.tops[::2], rows.heights[::2], strict=True)
    ]


def _width(panel: Panel) -> float:
    texts = max((len(one.text) for one in panel.measurements), default=0)
    return max(
        len(panel.title) * _TITLE_CHARACTER,
        len(panel.note) * SMALL_CHARACTER,
        _LENGTH + _APART + texts * SMALL_CHARACTER,
    )


def _panel(panel: Panel, rows: _Rows, *, x: float) -> list[str]:
    known = [one for one in panel.measurements if one.median is not None]
    least, most = panel.axis or (0.0, max((one.most for one in known), default=0.0))
    scale = _Scale(x, least, _LENGTH / (most - least) if most > least else 0.0)
    parts = [
        f'<text class="name" x="{x:.1f}" y="86">{svg_text(panel.title)}</text>',
        f'<text class="quiet" x="{x:.1f}" y="102">{svg_text(panel.note)}</text>',
    ]
    texts = max((len(one.text) for one in panel.measurements), default=0)
    text_end = x + _LENGTH + _APART + texts * SMALL_CHARACTER
    for number, one in enumerate(panel.measurements):
        y = rows.middle(number)
        parts += _draw_mark(one, scale, y, is_bar=panel.axis is None)
        parts.append(f'<text class="end" x="{text_end:.1f}" y="{y + 4:.1f}">{svg_text(one.text)}</text>')
    if panel.axis is not None and known:
        for value, kind in ((least, "quiet"), (most, "quiet end")):
            text = panel.ends.format(value)
            parts.append(
                f'<text class="{kind}" x="{scale.position_of(value):.1f}" y="{rows.bottom + _LINE:.1f}">{text}</text>'
            )
    return parts


def _draw_mark(one: Measurement, scale: _Scale, y: float, *, is_bar: bool) -> list[str]:
    """Draw a bar or a dot, with a whisker if the repeats differ visibly."""
    if one.median is None:
        return []
    middle = scale.position_of(one.median)
    parts = [f'<circle class="bar" cx="{middle:.1f}" cy="{y:.1f}" r="{_DOT}"/>']
    if is_bar:
        width = max(1.0, middle - scale.x)
        parts = [f'<rect class="bar" x="{scale.x:.1f}" y="{y - _BAR / 2:.1f}" width="{width:.1f}" height="{_BAR}"/>']
    least, most = scale.position_of(one.least), scale.position_of(one.most)
    if most - least >= _LEAST_WHISKER:
        caps = "".join(f"M{end:.1f} {y - 3:.1f}v6" for end in (least, most))
        parts.append(f'<path class="whisker" d="M{least:.1f} {y:.1f}H{most:.1f}{caps}"/>')
    return parts
