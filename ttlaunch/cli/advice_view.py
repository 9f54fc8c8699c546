"""What `ttlaunch advise` takes and prints: the memory of hosts; and the forms of a training, the quickest first, with their commands."""

import os
import re
from collections.abc import Iterable

from ttlaunch.app.fits import parse_limit
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import counted, render_size, usage_error
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.lab.advise import Advice, Ranking
from ttlaunch.lab.virtual import GFLOPS

_HERE = "local"
_NAMED = re.compile(r"([^=\s]{1,255})=(.+)")
_HEADING = (
    "",
    "recipe (layout)",
    "ranks",
    "form",
    "step",
    "computing",
    "communication",
    "waiting",
    "bits",
    "memory",
    "why",
)


def parse_fits(texts: Iterable[str]) -> dict[str, int]:
    """Return the bytes of each host that is named; under `""` those of all others.

    Raises:
        LaunchError: A text is no size, or a host comes twice.
    """
    found: dict[str, int] = {}
    for text in texts:
        parts = _NAMED.fullmatch(text)
        host, size = (parts[1], parts[2]) if parts else ("", text)
        if host in found:
            which = f"host {shown(host)}" if host else "all hosts"
            raise usage_error(f"`--fits` gives the memory of {which} twice", "leave one of them out")
        found[host] = parse_limit(size)
    return found


def render_ranking(found: Ranking, *, top: int) -> list[str]:
    """Render the first forms as a table, then their commands, and what is not in the table."""
    shown_ones = [one for one in found.ranked if one.fits is not False][:top]
    best = min((one.slowest.step_ms for one in shown_ones), default=float("inf"))
    quicker = [one for one in found.ranked if one.fits is False and one.slowest.step_ms < best]
    conditions = found.conditions
    speed = f"{GFLOPS:g} GFLOP/s" if conditions.compute_ms is None else f"{conditions.compute_ms:g} ms a micro-batch"
    batch = counted(found.ranked[0].batch, "sequence")
    rows = [_row(str(place), one) for place, one in enumerate(shown_ones, start=1)]
    rows += [_row("–", one) for one in quicker[:top]]
    lines = [
        f"the training of {found.recipe} on {found.topology}, by the time of a step of {batch}, ms",
        f"  computing        {speed}",
        f"  messages         {conditions.link_us:g} µs, and {conditions.link_gbps:g} Gbit/s out of and into each rank",
        "",
        *render_table([_HEADING, *rows], right=(0, 2, 4, 5, 6, 7), indent="  "),
        "",
        *(f"{place}: {one.command}" for place, one in enumerate(shown_ones, start=1)),
    ]
    more, refused = len(found.ranked) - len(shown_ones) - len(quicker[:top]), len(found.refused)
    notes = [f"note  {counted(more, 'form')} more with `--top {len(found.ranked)}`"] if more else []
    notes += [] if shown_ones else ["note  no form fits into the memory of these hosts"]
    notes += [f"note  {counted(refused, 'form')} cannot run here; `--format json` says why"] if refused else []
    cores = os.cpu_count() or 1
    if found.topology == _HERE and any(one.form.ranks > cores for one in shown_ones):
        notes.append(
            f"note  each rank is taken to compute on a processor of its own; this machine has {cores}, so more ranks are slower here"
        )
    if not any(one.needed or one.not_predicted for one in found.ranked):
        notes.append("note  memory was not considered; `--fits 24GB` gives that of each host")
    return [*lines, "", *notes] if notes else lines


def _row(place: str, one: Advice) -> tuple[str, ...]:
    terms = list(one.terms.values())
    values = ", ".join(text.rpartition(".")[2] if "{" not in text else text for text in one.form.values)
    most = max(one.needed.values(), default=None)
    memory = ("?" if one.not_predicted else "–") if most is None else render_size(most)
    numbers = (f"{one.slowest.step_ms:.3f}", *(f"{term:.3f}" for term in terms))
    bits = "same" if one.has_same_bits else "other"
    name = f"{one.form.recipe} ({one.layout})"
    return (place, name, str(one.form.ranks), values, *numbers, bits, memory, one.why)


def advice_line(place: int, one: Advice) -> tuple[object, ...]:
    """Return what `--format concise` prints of a form: a row for each."""
    fits = {None: "?", True: "fits", False: "does not fit"}[one.fits]
    return (place, one.form.recipe, one.layout, one.form.ranks, one.slowest.step_ms, one.dominant, fits, one.command)
