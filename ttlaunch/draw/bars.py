"""Bars as SVG, a panel for each number, a bar for each thing that was measured, with how far its measurements lie apart."""

from collections.abc import Sequence
from dataclasses import dataclass

from ttlaunch.draw.style import STYLE
from ttlaunch.draw.svg_box import SMALL_CHARACTER, svg_text

_BAR, _GAP, _PANEL, _MARGIN = 16, 8, 300, 20
_TOP, _TITLE = 56, 26


@dataclass(frozen=True)
class Bar:
    """One bar: its length, the ends of the whisker on it, and what stands beside it; `value` None: nothing was measured."""

    value: float | None
    least: float = 0.0
    most: float = 0.0
    text: str = "–"


@dataclass(frozen=True)
class Panel:
    """One number of all things, in their order."""

    title: str
    bars: tuple[Bar, ...]


def render_bars(title: str, names: Sequence[str], panels: Sequence[Panel]) -> str:
    """The picture, complete; panels stand side by side, so that a thing is one line through all of them."""
    left = _MARGIN + max(map(len, names), default=0) * SMALL_CHARACTER + 12
    beside = max((len(bar.text) for panel in panels for bar in panel.bars), default=0) * SMALL_CHARACTER + 12
    pitch = _PANEL + beside + _MARGIN
    width = left + len(panels) * pitch
    height = _TOP + _TITLE + len(names) * (_BAR + _GAP) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">',
        f"<title>{svg_text(title)}</title><style>{STYLE}</style>",
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
        f'<text class="heading" x="{_MARGIN}" y="34">{svg_text(title)}</text>',
    ]
    for number, name in enumerate(names):
        parts.append(f'<text class="end" x="{left - 12:.1f}" y="{_middle(number) + 4:.1f}">{svg_text(name)}</text>')
    for number, panel in enumerate(panels):
        parts += _panel(panel, left + number * pitch, colour=number)
    return "".join(parts) + "</svg>\n"


def _panel(panel: Panel, x: float, *, colour: int) -> list[str]:
    most = max((max(bar.most, bar.value) for bar in panel.bars if bar.value is not None), default=0.0)
    scale = _PANEL / most if most > 0 else 0.0
    parts = [f'<text class="name" x="{x:.1f}" y="{_TOP + 14}">{svg_text(panel.title)}</text>']
    for number, bar in enumerate(panel.bars):
        middle, end = _middle(number), x
        if bar.value is not None:
            width = max(1.0, bar.value * scale)
            end = x + max(width, bar.most * scale)
            parts.append(
                f'<rect class="role-{colour % 6}" x="{x:.1f}" y="{middle - _BAR / 2:.1f}" width="{width:.1f}" height="{_BAR}"/>'
            )
        if bar.value is not None and bar.most > bar.least:
            parts.append(
                f'<path class="link" d="M{x + bar.least * scale:.1f} {middle:.1f}H{x + bar.most * scale:.1f}"/>'
            )
        parts.append(f'<text x="{end + 6:.1f}" y="{middle + 4:.1f}">{svg_text(bar.text)}</text>')
    return parts


def _middle(number: int) -> float:
    return _TOP + _TITLE + number * (_BAR + _GAP) + _BAR / 2
