"""What `ttlaunch simulate --virtual` takes and prints: slow ranks, the time of a step by rank with its parts, and what would change them."""

import re
from collections.abc import Callable, Iterable, Sequence

from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import counted, usage_error
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.draw.bars import Measurement, Panel, render_bars
from ttlaunch.lab.virtual import GFLOPS, Conditions, StepTime, VirtualRun
from ttlaunch.lab.virtual_faults import VirtualVerdict
from ttlaunch.lab.what_if import Variant
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.planning.routes import network_of

_SLOW = re.compile(r"([0-9]{1,7})=([0-9]{1,6}(?:\.[0-9]{1,6})?)")
_PARTS = ("computing", "exposed communication", "waiting")
_HEADING = ("ranks", "role", "step", *_PARTS)


def parse_slow(texts: Iterable[str], *, option: str) -> dict[int, float]:
    """Return the factor of each slow rank.

    Args:
        texts: What was given.
        option: The option, for messages.

    Raises:
        LaunchError: A text is not `RANK=FACTOR`, the factor is 0, or a rank comes twice.
    """
    found: dict[int, float] = {}
    for text in texts:
        parts = _SLOW.fullmatch(text)
        if parts is None or not float(parts[2]):
            raise usage_error(f"`{option} {shown(text)}` names no rank and factor", f"`{option} 3=1.5`")
        if int(parts[1]) in found:
            raise usage_error(f"`{option}` names rank {int(parts[1])} twice", "leave one of them out")
        found[int(parts[1])] = float(parts[2])
    return found


def render_virtual(found: VirtualRun) -> list[str]:
    """Render the time of a step and its parts; ranks with equal times share a line."""
    rows = [(_ranges(sorted(spans)), *key) for key, spans in _groups(found.groups).items()]
    folded = "each runs its own code"
    if found.repeats:
        folded = f"{found.repeats:,} of them repeat what the code of a few does, each at times of its own"
    if found.not_folded is not None:
        folded += f", because {found.not_folded}"
    if (runs := len(found.groups)) < found.plan.world_size:
        folded = f"{counted(runs, 'group')} of ranks that do the same, of which one stands for all"
    conditions = found.conditions
    step = "no rank counts steps" if found.step_ms is None else f"{found.step_ms:.3f} ms"
    return [
        f"{counted(found.plan.world_size, 'rank')} on a virtual clock, {counted(conditions.steps, 'step')}",
        *render_machines(conditions, found.plan),
        f"  ranks            {folded}",
        f"  step             {step}",
        "",
        "  a step of each rank, ms",
        *render_table([_HEADING, *rows], right=range(2, len(_HEADING)), indent="    "),
        "",
        f"  sent in steps    {found.step_bytes:,} bytes over {counted(found.pairs, 'pair')} of ranks{_bytes_verdict(found)}",
        *([] if found.verdict is None else render_verdict(found.verdict)),
    ]


def render_machines(conditions: Conditions, plan: LaunchPlan) -> list[str]:
    """Render how fast ranks compute and messages travel."""
    speed = f"{GFLOPS:g} GFLOP/s" if conditions.compute_ms is None else f"{conditions.compute_ms:g} ms a micro-batch"
    network = network_of(plan, over_links=conditions.over_links)
    where = "out of and into each rank" if network is None else network.speed
    return [
        f"  computing        {speed}",
        f"  messages         {conditions.link_us:g} µs, and {conditions.link_gbps:g} Gbit/s {where}",
    ]


def render_verdict(verdict: VirtualVerdict) -> list[str]:
    """Render what a run with these faults would end with."""
    rows = [
        (one.fault, f"not made: {one.reason}", "", "")
        if one.at_s is None
        else (one.fault, str(one.outcome), f"step {one.step}" if one.step else "", f"{one.at_s:.3f} s")
        for one in verdict.faults
    ]
    failure = verdict.failure
    named = [] if failure is None else [f"  named            {failure.code}: {failure.message}"]
    end = f"{verdict.status}, over after {verdict.over_s:.3f} s, exit status {verdict.exit_status}"
    if verdict.exit_status is None:
        end = f"waits for workers from {verdict.over_s:.3f} s on, until their host is back or somebody ends it"
    return [
        "",
        *render_table([("fault", "outcome", "after", "made at"), *rows], indent="  "),
        "",
        f"  the run          {end}",
        *named,
    ]


def render_variants(variants: Sequence[Variant]) -> list[str]:
    """Render what changes if one thing does: the step, what it is made of on the rank that takes longest, and what is trained in a second."""
    first = variants[0].sequences_per_s
    rows = []
    for one in variants:
        slowest, speed = _slowest(one), one.sequences_per_s
        if one.found is None or slowest is None or speed is None or first is None:
            rows.append((one.name, *[""] * 6, one.reason or "no rank counts steps"))
            continue
        parts = (slowest.computing_ms, slowest.exposed_ms, slowest.waiting_ms)
        numbers = (f"{one.found.plan.world_size:,}", f"{slowest.step_ms:.3f}", *(f"{part:.3f}" for part in parts))
        change = "" if one is variants[0] else f"{speed / first - 1:+.1%}"
        rows.append((one.name, *numbers, f"{speed:,.1f}", change))
    heading = ("what if", "ranks", "step", *_PARTS, "sequences/s", "change")
    return [
        "a step of the rank that takes longest, ms",
        *render_table([heading, *rows], right=range(1, 7), indent="  "),
    ]


def draw_variants(variants: Sequence[Variant]) -> str:
    """Draw the same numbers as SVG."""
    slowest = [_slowest(one) for one in variants]

    def panel(title: str, note: str, values: Sequence[float | None]) -> Panel:
        found = (Measurement(one, one or 0.0, one or 0.0, "–" if one is None else f"{one:,.4g}") for one in values)
        return Panel(title, note, tuple(found))

    def part(title: str, note: str, value: Callable[[StepTime], float]) -> Panel:
        return panel(title, note, [None if one is None else value(one) for one in slowest])

    panels = [
        panel("speed", "sequences/s", [one.sequences_per_s for one in variants]),
        part("step", "ms", lambda one: one.step_ms),
        part("computing", "ms", lambda one: one.computing_ms),
        part("communication", "exposed, ms", lambda one: one.exposed_ms),
        part("waiting", "for other ranks, ms", lambda one: one.waiting_ms),
    ]
    first = variants[0].found
    assert first is not None  # noqa: S101 - without it there are no variants
    note = f"a step of the rank that takes longest, on a virtual clock, {counted(first.conditions.steps, 'step')}"
    return render_bars(f"What if: {first.plan.program.name}", [[one.name] for one in variants], panels, note=note)


def _slowest(variant: Variant) -> StepTime | None:
    return None if variant.found is None else variant.found.slowest


def _bytes_verdict(found: VirtualRun) -> str:
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
