"""What `ttlaunch plan --step-time` prints: the step of each rank, by the parts that it is made of, and what was measured for it."""

import time
from collections.abc import Iterator
from typing import Any

from ttlaunch.app.predict import NotPredicted
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import render_size, shown
from ttlaunch.running.metrics.time_prediction import BUSY, PHASES, Interval, RankTime, TimePrediction

Found = TimePrediction | NotPredicted | None


def render_time(found: Found) -> list[str]:
    """Render the time of a step as a table; why there is none; or where to get it."""
    if found is None:
        return [
            "",
            "  the time of a step is not predicted: add `--step-time` to rehearse the plan here for some seconds",
        ]
    if isinstance(found, NotPredicted):
        return ["", f"  the time of a step is not predicted: {found.reason}"]
    waiting = "bubble" if found.is_pipeline else "waiting"
    heading = ("rank", "role", *PHASES, "step", "from", "to", "of it: computing", "exposed", waiting)
    return [
        "",
        "  time of a step, ms: medians of rehearsed steps, of which eight in ten took the time between `from` and `to`",
        *render_table([heading, *map(_row, found.ranks)], right=range(2, len(heading)), indent="    "),
        f"    {_together(found)}",
        f"    rehearsed {_ago(found.kept.made)} on this machine, {found.kept.steps} steps, {_copies(found)}",
        *_link(found),
        *_notes(found),
    ]


def _copies(found: TimePrediction) -> str:
    """Return in how many processes ranks were rehearsed; only those of a single rank, which measures no messages, come one after the other."""
    count = found.kept.copies
    if count == 1:
        return "in one process"
    return f"in {count} processes{', one after the other' if found.kept.link is None else ' at the same time'}"


def _row(one: RankTime) -> tuple[str, ...]:
    parts = (*(one.phases[name].median for name in PHASES), one.step.median, one.step.low, one.step.high)
    waits = (one.computing_s, one.exposed.median, one.waiting.median)
    return (str(one.rank), one.role, *map(_ms, (*parts, *waits)))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _together(found: TimePrediction) -> str:
    step = found.step
    if found.is_wide:
        return f"a step takes {_ms(step.low)} to {_ms(step.high)} ms: ranks outnumber cores, and which one waits for a core is not known"
    return f"a step takes {_ms(step.median)} ms, between {_ms(step.low)} and {_ms(step.high)}"


def _link(found: TimePrediction) -> list[str]:
    link = found.kept.link
    if link is None:
        return []
    measured = ", ".join(f"{render_size(one.size)} {one.median_s * 1e6:,.0f} µs" for one in link.samples)
    return [
        f"    a message costs two cores {link.latency_s * 1e6:.0f} µs, {link.again_s * 1e6:.0f} right after another, and 1 s for each {render_size(int(link.bytes_per_s))} (measured: {measured})"
    ]


def _notes(found: TimePrediction) -> list[str]:
    notes = []
    if found.not_kept is not None:
        notes.append(
            f"    note  the calibration cannot be kept in your cache folder: {shown(found.not_kept)}; `XDG_CACHE_HOME` names another one"
        )
    if found.kept.busy < BUSY:
        return notes
    busy = f"computing took {found.kept.busy:.1f} times its processor time"
    return [
        *notes,
        f"    note  the machine was busy: {busy}; without other work, steps are near the median, and with it near `to`",
    ]


def _ago(made: float) -> str:
    seconds = max(0.0, time.time() - made)
    for size, name in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return "just now"


def time_as_json(found: Found) -> dict[str, Any]:
    """Return the time for JSON; `time_not_predicted` says why there is none."""
    if isinstance(found, TimePrediction):
        return {"time": found.as_json(), "time_not_predicted": None}
    return {"time": None, "time_not_predicted": "no calibration is kept" if found is None else found.reason}


def time_lines(found: Found) -> Iterator[tuple[Any, ...]]:
    """Yield what `--format concise` prints: a row for each rank, and one for the step."""
    if not isinstance(found, TimePrediction):
        return
    for one in found.ranks:
        parts = (*(one.phases[name] for name in PHASES), one.exposed, one.waiting)
        yield "time", one.rank, one.role, *_whole(one.step), *(part.median for part in parts)
    yield "step", *_whole(found.step)


def _whole(one: Interval) -> tuple[float, float, float]:
    return one.low, one.median, one.high
