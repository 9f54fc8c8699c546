"""What `ttlaunch simulate --virtual` takes and prints: slow ranks, and the time of a step by rank with the parts it is made of."""

import re
from collections.abc import Iterable

from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import counted, usage_error
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.lab.virtual import GFLOPS, StepTime, VirtualRun

_SLOW = re.compile(r"([0-9]{1,7})=([0-9]{1,6}(?:\.[0-9]{1,6})?)")
_HEADING = ("ranks", "role", "step", "computing", "exposed communication", "waiting")


def parse_slow(texts: Iterable[str]) -> dict[int, float]:
    """Return the factor of each slow rank.

    Raises:
        LaunchError: A text is not `RANK=FACTOR`, the factor is 0, or a rank comes twice.
    """
    found: dict[int, float] = {}
    for text in texts:
        parts = _SLOW.fullmatch(text)
        if parts is None or not float(parts[2]):
            raise usage_error(f"`--slow {shown(text)}` names no rank and factor", "`--slow 3=1.5`")
        if int(parts[1]) in found:
            raise usage_error(f"`--slow` names rank {int(parts[1])} twice", "leave one of them out")
        found[int(parts[1])] = float(parts[2])
    return found


def render_virtual(found: VirtualRun) -> list[str]:
    """Render the time of a step and its parts; ranks with equal times share a line."""
    rows = [(_ranges(sorted(spans)), *key) for key, spans in _groups(found.groups).items()]
    folded = (
        "each runs its own code" if found.not_folded is None else f"each runs its own code, because {found.not_folded}"
    )
    if (runs := len(found.groups)) < found.plan.world_size:
        folded = f"{counted(runs, 'group')} of ranks that do the same, of which one stands for all"
    conditions = found.conditions
    speed = f"{GFLOPS:g} GFLOP/s" if conditions.compute_ms is None else f"{conditions.compute_ms:g} ms a micro-batch"
    step = "no rank counts steps" if found.step_ms is None else f"{found.step_ms:.3f} ms"
    return [
        f"{counted(found.plan.world_size, 'rank')} on a virtual clock, {counted(conditions.steps, 'step')}",
        f"  computing        {speed}",
        f"  messages         {conditions.link_us:g} µs, and {conditions.link_gbps:g} Gbit/s out of and into each rank",
        f"  ranks            {folded}",
        f"  step             {step}",
        "",
        "  a step of each rank, ms",
        *render_table([_HEADING, *rows], right=range(2, len(_HEADING)), indent="    "),
        "",
        f"  sent in steps    {found.step_bytes:,} bytes over {counted(found.pairs, 'pair')} of ranks{_verdict(found)}",
    ]


def _verdict(found: VirtualRun) -> str:
    if found.no_formula is not None:
        return f"; no formula, because {found.no_formula}"
    if found.differing:
        return f"; {counted(found.differing, 'pair')} sent other bytes than the formula says"
    return ", exactly as the formula says"


def _groups(groups: Iterable[StepTime]) -> dict[tuple[str, ...], list[tuple[int, int]]]:
    """Put ranks together whose times look the same."""
    found: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for one in groups:
        times = (one.step_ms, one.computing_ms, one.exposed_ms, one.waiting_ms)
        found.setdefault((one.role, *(f"{time:.3f}" for time in times)), []).extend(one.ranks)
    return found


def _ranges(spans: Iterable[tuple[int, int]]) -> str:
    """Write `0-3, 5`."""
    rows: list[list[int]] = []
    for first, last in spans:
        if rows and first == rows[-1][1] + 1:
            rows[-1][1] = last
        else:
            rows.append([first, last])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in rows)
