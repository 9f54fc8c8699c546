"""Draw the losses of a run: in the terminal over its steps, and as SVG over steps, seconds and bytes."""

import shutil
import sys
from collections.abc import Callable

from ttlaunch.diagnostics import counted
from ttlaunch.draw.curves import Chart, Curve, render_chart_text, render_charts_svg
from ttlaunch.running.readers.losses import Losses, LossPoint

_NARROWEST, _WIDEST, _LINES = 40, 120, 14
_LEGEND = "training: line (mean of all ranks)   validation: o"


def plot_losses(losses: Losses) -> list[str]:
    """Draw the losses over the steps for a terminal."""
    if not losses.training and not losses.validation:
        return ["  no rank reported a loss that can be drawn"]
    width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns - 3))
    is_plain = "utf" not in (sys.stdout.encoding or "").lower()
    lines = render_chart_text(_chart("steps", losses, lambda one: one.step), width=width, height=_LINES, plain=is_plain)
    return [f"  {line}" for line in ("loss", *lines, _LEGEND, *_left_out(losses))]


def draw_losses(name: str, losses: Losses, *, bytes_per_step: float | None) -> str:
    """Draw the losses as SVG over steps and seconds, and over bytes if these are known.

    Args:
        name: The title of the picture.
        losses: The losses of the run.
        bytes_per_step: The bytes that all ranks together send in a step, in the mean.
    """
    charts = [
        _chart("steps", losses, lambda one: one.step),
        _chart("seconds of training", losses, lambda one: one.seconds),
    ]
    if bytes_per_step:
        size = bytes_per_step / 1e6
        charts.append(_chart("MB sent by all ranks", losses, lambda one: one.step * size))
    note = "; ".join(("loss, training and validation", *_left_out(losses)))
    return render_charts_svg(name, charts, note=note)


def _chart(title: str, losses: Losses, position: Callable[[LossPoint], float]) -> Chart:
    def points(found: tuple[LossPoint, ...]) -> tuple[tuple[float, float], ...]:
        return tuple((position(one), one.loss) for one in found)

    return Chart(
        title,
        (Curve("training", points(losses.training)), Curve("validation", points(losses.validation), is_dots=True)),
    )


def _left_out(losses: Losses) -> list[str]:
    return [f"{counted(losses.left_out, 'value')} left out: NaN, infinite or too large"] if losses.left_out else []
