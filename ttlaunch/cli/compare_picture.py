"""Draw a comparison from its JSON: speed, loss, bytes, memory and idle time of every recipe."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ttlaunch.diagnostics import counted
from ttlaunch.draw.bars import Measurement, Panel, render_bars

_CHANGE_SEPARATOR = re.compile(r", (?=[a-z_][a-z0-9_]*=)")


def draw_comparison(content: Mapping[str, Any]) -> str:
    """Draw the comparison as SVG, without recipes that failed.

    Args:
        content: The content of `comparison.json`.
    """
    rows = [row for row in content["rows"] if row["runs"]]

    def panel(title: str, note: str, key: str, *, form: str, scale: float = 1.0, begins_at_zero: bool = True) -> Panel:
        found = tuple(_measurement(row, key, form=form, scale=scale) for row in rows)
        return Panel(title, note, found, begins_at_zero=begins_at_zero, ends=form)

    counts = "samples" if any(row.get("samples_per_s") for row in rows) else "tokens"
    panels = [
        panel("speed", f"{counts}/s, higher is better", f"{counts}_per_s", form="{:,.0f}"),
        panel("loss", "validation, lower is better", "loss", form="{:.3f}", begins_at_zero=False),
        panel("traffic", "MB per step, all ranks", "bytes_per_step", form="{:.2f}", scale=1e-6),
        panel("memory", "peak MB, largest rank", "memory_bytes", form="{:.0f}", scale=1e-6),
        panel("idle", "% of a step, lower is better", "idle_share", form="{:.0f}", scale=100),
    ]
    workload = content["workload"]
    repeats = (
        f"{counted(workload['repeats'], 'run')} of each: median, minimum and maximum"
        if rows
        else "nothing was measured"
    )
    title = f"The same model, data and seed for {workload['steps']} steps"
    return render_bars(
        title, [_name_lines(row["name"]) for row in rows], panels, note=f"{content['machine']}; {repeats}"
    )


def _measurement(row: Mapping[str, Any], key: str, *, form: str, scale: float) -> Measurement:
    spread = row[key]
    if spread is None:
        return Measurement(None)
    median, least, most = (spread[name] * scale for name in ("median", "least", "most"))
    sign = "≈" if key == "bytes_per_step" and not row["is_counted"] else ""
    return Measurement(median, least, most, sign + form.format(median))


def _name_lines(name: str) -> Sequence[str]:
    """Split `zero (stage=3, a=b)` into three lines, so that long names leave room for the numbers."""
    recipe, bracket, changes = name.partition(" (")
    return [recipe, *_CHANGE_SEPARATOR.split(changes.removesuffix(")"))] if bracket else [recipe]
