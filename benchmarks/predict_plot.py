"""The plot of `predict.py`: predicted against measured, a square for each kind, on logarithmic axes."""

import math
from collections.abc import Mapping, Sequence

Point = tuple[float, float, bool]
"""What was measured, what was predicted, and whether the trial counts."""


def draw(panels: Mapping[str, Sequence[Point]]) -> str:
    """Draw panels side by side, each with its title."""
    style = (
        "text{font:11px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#c9d1d9}.same{stroke:#768390;stroke-dasharray:4 3}"
        ".dot{fill:#0969da;fill-opacity:.6}.open{fill:none;stroke:#0969da}"
        "@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.dot{fill:#58a6ff}.open{stroke:#58a6ff}}"
    )
    squares = "".join(
        panel(title, points, left=60 + 340 * place) for place, (title, points) in enumerate(panels.items())
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1380 340" role="img"><title>Predicted against measured</title>'
        f"<style>{style}</style>{squares}</svg>\n"
    )


def panel(title: str, points: Sequence[Point], *, left: int) -> str:
    """Draw one square: a dot for each trial, an empty one if its halves did not agree, and the line on which both are equal."""
    values = [value for real, said, _ in points for value in (real, said)] or [1.0, 10.0]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1

    def at(value: float) -> float:
        return 260 * (math.log10(value) - low) / (high - low)

    parts = [
        f'<text x="{left}" y="20">{title}</text>',
        f'<path class="axis" fill="none" d="M{left} 40v260h260"/>',
        f'<path class="same" d="M{left} 300L{left + 260} 40"/>',
    ]
    for exponent in range(math.floor(low), math.ceil(high) + 1):
        for digit in (1, 2, 3, 5):
            tick = digit * 10.0**exponent
            if low <= math.log10(tick) <= high:
                parts.append(f'<text x="{left + at(tick):.0f}" y="316" text-anchor="middle">{tick:g}</text>')
                parts.append(f'<text x="{left - 6}" y="{304 - at(tick):.0f}" text-anchor="end">{tick:g}</text>')
    parts += [
        f'<circle class="{"dot" if counts else "open"}" r="3.5" cx="{left + at(real):.1f}" cy="{300 - at(said):.1f}"/>'
        for real, said, counts in points
    ]
    return "".join(parts)
