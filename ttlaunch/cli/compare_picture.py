"""Draw a comparison from its JSON: a bar for every number of a recipe, and the loss as curves over steps, seconds and bytes."""

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ttlaunch.diagnostics import counted
from ttlaunch.draw.bars import Measurement, Panel, render_bars
from ttlaunch.draw.curves import Chart, Curve, render_charts_svg, value_axis

_CHANGE_SEPARATOR = re.compile(r", (?=[a-z_][a-z0-9_]*=)")


def draw_comparison(content: Mapping[str, Any]) -> str:
    """Draw the comparison as SVG, without recipes that failed.

    Args:
        content: The content of `comparison.json`.
    """
    rows = [row for row in content["rows"] if row["runs"]]

    def panel(
        title: str, note: str, key: str, *, form: str, scale: float = 1.0, axis: tuple[float, float] | None = None
    ) -> Panel:
        found = tuple(_measurement(row, key, form=form, scale=scale) for row in rows)
        return Panel(title, note, found, axis=axis, ends="{:g}")

    counts = "samples" if any(row.get("samples_per_s") for row in rows) else "tokens"
    panels = [
        panel("speed", f"{counts}/s, higher is better", f"{counts}_per_s", form="{:,.0f}"),
        panel("loss", "validation, lower is better", "loss", form="{:.3f}", axis=_loss_axis(rows)),
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


def _loss_axis(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Choose the axis of losses: from the untrained model's to the lowest, so that a distance is a share of what training did."""
    losses = [run[name] for row in rows for run in row["runs"] for name in ("first_loss", "loss")]
    axis = value_axis([loss for loss in losses if isinstance(loss, float) and math.isfinite(loss)])
    return axis.least, axis.most


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


def draw_loss_curves(content: Mapping[str, Any]) -> str:
    """Draw the training loss of every recipe over steps, seconds and bytes as SVG, with the spread over repeats.

    Args:
        content: The content of `comparison.json`.
    """
    curves = {row["name"]: [run["curve"] for run in row["runs"] if run.get("curve")] for row in content["rows"]}
    known = {name: runs for name, runs in curves.items() if runs}
    positions = (("steps (global batches)", 0, 1.0), ("seconds of training", 2, 1.0), ("MB sent by all ranks", 3, 1e-6))
    charts = [
        Chart(title, tuple(_loss_curve(name, runs, at, scale=scale) for name, runs in known.items()))
        for title, at, scale in positions
    ]
    repeats = counted(content["workload"]["repeats"], "run")
    note = f"{content['machine']}; medians of {repeats} of each, with the range between minimum and maximum"
    return render_charts_svg("Training loss with the same model, data and seed", charts, note=note)


def _loss_curve(name: str, runs: Sequence[Sequence[Sequence[float | None]]], at: int, *, scale: float) -> Curve:
    """Join the curves of the repeats: the median of what they have at the same number of steps."""
    points, band = [], []
    for entries in zip(*runs, strict=False):
        losses = [entry[1] for entry in entries if entry[1] is not None]
        places = [entry[at] for entry in entries if entry[at] is not None]
        if losses and places:
            x = median(place for place in places if place is not None) * scale
            points.append((x, median(losses)))
            band.append((x, min(losses), max(losses)))
    return Curve(name, tuple(points), tuple(band))
