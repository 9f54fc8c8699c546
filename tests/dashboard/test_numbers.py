"""The numbers on the page are those of `ttlaunch metrics --format json`, and what is left out of a chart cannot be seen (X1)."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ttlaunch.cli.main import make_app
from ttlaunch.dashboard.live import LiveRun
from ttlaunch.dashboard.numbers import Series, series_as_json, thin
from ttlaunch.running.metrics.event_log import Event
from ttlaunch.running.metrics.names import metrics_of


def test_every_series_has_the_numbers_that_the_command_line_prints(make_run):
    run = make_run()
    run.steps(1, 30)
    run.telemetry(20)
    run.record(0, kind="validation", time=1e9, step=0, loss=float("inf"), perplexity=float("nan"), tokens=64)
    run.end()
    printed = CliRunner().invoke(make_app("metrics"), ["metrics", str(run.path), "--format", "json"]).stdout
    expected = {}
    for line in printed.splitlines():
        event = json.loads(line)
        found = Event(event["time"], event["kind"], event.get("rank"), event.get("step"), event["values"])
        if found.rank is not None:
            for name, value in metrics_of(found).items():
                expected.setdefault((name, found.rank), []).append((found.step or 0, value))
    live = LiveRun(run.path)
    names = live.names()["names"]

    assert {name for name, _ in expected} <= set(names)
    for (name, rank), points in expected.items():
        one = live.series(name, first=None, last=None, most=2000)["ranks"][str(rank)]
        assert points == list(zip(one["steps"], one["values"], strict=True))
    values = live.series("validation/loss", first=None, last=None, most=2000)["ranks"]["0"]["values"]
    assert ["inf"] == values  # JSON has no such number


@given(st.lists(st.floats(width=32), min_size=0, max_size=400), st.integers(4, 40))
def test_thinning_keeps_the_ends_and_the_extremes_and_no_more_than_asked(values, most):
    chosen = thin(values, range(len(values)), most=most)

    assert len(chosen) <= max(most, 0)
    assert sorted(set(chosen)) == chosen
    if values:
        assert {0, len(values) - 1} <= set(chosen)
        known = [value for value in values if not math.isnan(value)]
        if known:
            kept = [values[at] for at in chosen if not math.isnan(values[at])]
            assert (min(known), max(known)) == (min(kept), max(kept))


def test_a_part_of_the_steps_is_thinned_by_itself():
    series = Series()
    for step in range(100_000):
        series.steps.append(step)
        series.times.append(0.0)
        series.values.append(float(step % 977))
    whole = series_as_json(series, first=None, last=None, most=2000)
    part = series_as_json(series, first=500, last=599, most=2000)

    assert 2000 >= len(whole["steps"])
    assert 100_000 == whole["points"]
    assert (list(range(500, 600)), 100) == (part["steps"], part["points"])
