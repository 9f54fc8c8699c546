"""The tables of `ttlaunch report`: bytes, times, memory, and what each operation costs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ttlaunch.cli.console import tabbed
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import counted
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.running.logs.fold import render_ranks
from ttlaunch.running.metrics.communication import OperationCost
from ttlaunch.running.metrics.served import Latency, ServedWork
from ttlaunch.running.metrics.telemetry import KINDS, RankMemory
from ttlaunch.running.metrics.times import Share, StepTimes
from ttlaunch.running.metrics.traffic import Edge, Settlement
from ttlaunch.running.readers.waits import Wait
from ttlaunch.running.start_times import FIRST_STEPS, OF_RANKS, PARTS, StartTimes


def render_edges(settlement: Settlement, roles: Sequence[str], *, tokens: int | None = None) -> list[str]:
    """Render a table of bytes with a row for each operation and pair of ranks.

    Args:
        settlement: The bytes.
        roles: The role of each rank.
        tokens: For a serving run, which has no steps, the tokens that it has generated.
    """
    reason = [f"  not compared: {settlement.reason}"] if settlement.reason else []
    if not settlement.edges:
        return ["  no rank sent anything", *reason]
    over = f"in {counted(settlement.steps, 'step')} and {counted(settlement.validations, 'validation')}"
    over = over if tokens is None else f"for {counted(tokens, 'token')}"
    rows: list[tuple[str, ...]] = [
        (f"sent {over}", "from", "to", "messages", "bytes", *["a token"] * bool(tokens), "÷ formula")
    ]
    for edge in settlement.edges:
        size = "not measured" if edge.size is None else f"{edge.size:,}"
        source, dest = (f"{rank} {roles[rank]}" for rank in (edge.source, edge.dest))
        each = [f"{(edge.size or 0) / tokens:,.0f}"] if tokens else []
        rows.append((edge.operation, source, dest, f"{edge.messages:,}", size, *each, _ratio(edge)))
    return [*render_table(rows, right={3, 4, 5, 6}, indent="  "), *reason]


def render_served(work: ServedWork, roles: Sequence[str]) -> list[str]:
    """Render what a serving run has answered, how long that took, and what each rank did meanwhile."""
    speed = f", {work.tokens_per_s:,.0f} tokens/s" if work.tokens_per_s else ""
    lines = [f"  {counted(work.texts, 'text')}, {counted(work.tokens, 'token')} in {work.working_s:,.2f} s{speed}"]
    if work.open_texts or work.waiting_texts:
        lines.append(f"  {work.open_texts or 0} of them open, {work.waiting_texts or 0} waiting for a place")
    times = [(name, *_milliseconds(one)) for name, one in _latencies(work) if one is not None]
    if times:
        lines += render_table([("time", "median ms", "p90 ms"), *times], right={1, 2}, indent="  ")
    if not work.working_s:
        return lines
    rows: list[tuple[str, ...]] = [("share of these seconds", "computing", "messages", "waiting", "rest")]
    for one in work.ranks:
        parts = (one.computing, one.messages, one.waiting, one.rest)
        shares = ("–" if part is None else f"{part / work.working_s:.1%}" for part in parts)
        rows.append((f"{one.rank} {roles[one.rank]}", *shares))
    return [*lines, "", *render_table(rows, right={1, 2, 3, 4}, indent="  ")]


def served_lines(work: ServedWork, roles: Sequence[str]) -> list[str]:
    """Render the same as lines with tabs; unknown values are empty, times of ranks in seconds."""
    lines = [_fields("served", work.texts, work.tokens, f"{work.working_s:.3f}")]
    lines += [_fields("latency", name, *_milliseconds(one)) for name, one in _latencies(work) if one is not None]
    for one in work.ranks:
        parts = (one.computing, one.messages, one.waiting, one.rest)
        seconds = (None if part is None else f"{part:.3f}" for part in parts)
        lines.append(_fields("work", f"{one.rank} {roles[one.rank]}", *seconds))
    return lines


def _latencies(work: ServedWork) -> tuple[tuple[str, Latency | None], ...]:
    return (("to the first token", work.first_token), ("to each further token", work.token))


def _milliseconds(one: Latency) -> tuple[str, str]:
    return f"{one.median_s * 1e3:,.2f}", f"{one.p90_s * 1e3:,.2f}"


def edge_lines(settlement: Settlement, roles: Sequence[str]) -> list[str]:
    """Render bytes as lines with tabs, one for each operation and pair of ranks; unknown values are empty."""
    return [
        _fields(
            "edge",
            edge.operation,
            *(f"{rank} {roles[rank]}" for rank in (edge.source, edge.dest)),
            edge.messages,
            edge.size,
            edge.expected,
        )
        for edge in settlement.edges
    ]


def render_epochs(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Render a table with a row for each epoch of an elastic run: who took part, why it began, and what that cost."""
    rows = [("epoch", "after step", "workers", "computed anew", "pause in s", "÷ formula", "because")]
    for epoch in epochs:
        pause = epoch.get("pause_s")
        members = render_ranks(list(epoch["members"]))
        because = "; ".join(map(str, epoch["reasons"])) or "the run began"
        lost = int(epoch.get("lost_steps", 0))
        because += f"; {counted(lost, 'step')} lost" if lost else ""
        numbers = (str(epoch["epoch"]), str(epoch["step"]), members, str(epoch["computed_anew"]))
        rows.append((*numbers, "–" if pause is None else f"{pause:.2f}", _ratio_of_epoch(epoch), clean(because)))
    return render_table(rows, right={0, 1, 3, 4, 5}, indent="  ")


def _ratio_of_epoch(epoch: Mapping[str, Any]) -> str:
    """Render the bytes that members sent, divided by those of the formula; members of an epoch of one worker send nothing."""
    sent = epoch.get("traffic")
    if not isinstance(sent, dict) or not sent.get("formula_bytes"):
        return "–"
    return f"{sent['bytes'] / sent['formula_bytes']:.3f}"


def epoch_lines(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Render epochs as lines with tabs."""
    return [
        _fields(
            "epoch",
            *(epoch["epoch"], epoch["step"], render_ranks(list(epoch["members"])), epoch["computed_anew"]),
            epoch.get("pause_s"),
            clean("; ".join(map(str, epoch["reasons"]))),
            epoch.get("lost_steps", 0),
        )
        for epoch in epochs
    ]


def render_waits(waits: Sequence[Wait]) -> list[str]:
    """Render a table of who waits for whom in a run that is active."""
    rows = [("rank", "at this moment", "for", "in")]
    for one in waits:
        lasts = "" if one.for_s is None else f"{one.for_s:.1f} s"
        where = f"{one.operation}, at {one.place}" if one.place else one.operation
        ago = f" (as it was {one.seen_s:.0f} s ago)" if one.seen_s else ""
        rows.append((f"{one.rank} {one.role}", one.state + ago, lasts, where))
    return render_table(rows, right={2}, indent="  ")


def wait_lines(waits: Sequence[Wait]) -> list[str]:
    """Render who waits for whom as lines with tabs."""
    return [
        _fields("wait", f"{one.rank} {one.role}", one.state, one.for_s, one.operation, one.place, one.seen_s)
        for one in waits
    ]


def time_lines(by_role: Mapping[str, StepTimes]) -> list[str]:
    """Render times as lines with tabs: each role's step, its phases and waits, with median and p90 in ms and the share."""
    lines = []
    for role, times in by_role.items():
        named = [("whole step", times.step), *((phase.name, phase) for phase in times.phases)]
        named += [(f"exposed: {wait.name}", wait) for wait in times.waits]
        lines += [_fields("time", role, name, *_numbers(share)) for name, share in named]
    return lines


def _fields(*values: object) -> str:
    return tabbed(values)


def _ratio(edge: Edge) -> str:
    if edge.size is None or edge.expected is None:
        return "–"
    if edge.ratio is None:
        return "not in it"
    return f"{edge.ratio:.3f}" + (" !" if edge.differs else "")


def render_start(start: StartTimes) -> list[str]:
    """Render a table of the parts of the time from Enter to the first step."""
    since = " from Enter" if "command" in start.parts else ""  # not of a call of the library, nor of a restart
    rows = [(f"time{since} to the first step", "", "ms", "share")]
    rows += [(label, who, f"{ms:,}", f"{ms / max(1, start.total_ms):.1%}") for label, who, ms in _start_parts(start)]
    rows.append(("together", "", f"{start.total_ms:,}", ""))
    note = f"measured to {FIRST_STEPS[start.first_step]} of rank {start.rank}, the last rank to get there"
    return [*render_table(rows, right={2, 3}, indent="  "), f"  {note}"]


def start_lines(start: StartTimes) -> list[str]:
    """Render the parts of a start as lines with tabs, with milliseconds."""
    return [_fields("start", *part) for part in _start_parts(start)]


def _start_parts(start: StartTimes) -> Iterator[tuple[str, str, int]]:
    for part, ms in start.parts.items():
        warm = ", which imports torch for them" if start.is_warm and part == "engine" else ""
        yield f"{PARTS[part]}{warm}", f"rank {start.rank} on {start.host}" if part in OF_RANKS else "", ms


def render_times(by_role: Mapping[str, StepTimes]) -> list[str]:
    """Render a table of the time that each role's steps and their parts take."""
    rows = [("time of a step", "", "median ms", "p90 ms", "share")]
    for role, times in by_role.items():
        name = role if len(times.ranks) == 1 else f"{role} ×{len(times.ranks)}"
        rows.append((name, "whole step", *_numbers(times.step)))
        rows += [("", phase.name, *_numbers(phase)) for phase in times.phases]
        rows += [("", f"exposed: {wait.name}", *_numbers(wait)) for wait in times.waits]
    return render_table(rows, right={2, 3, 4}, indent="  ")


def _numbers(share: Share) -> tuple[str, str, str]:
    return f"{share.median * 1e3:,.2f}", f"{share.p90 * 1e3:,.2f}", f"{share.share:.1%}"


def render_memory(found: Sequence[RankMemory], roles: Sequence[str], processes: Mapping[int, int]) -> list[str]:
    """Render a table of memory in megabytes.

    Args:
        found: The measurements of some ranks.
        roles: The role of each rank.
        processes: The peak memory of each rank's process, for the processes that have ended.
    """
    steps = sorted({one.step for one in found})
    heading = ("rank", "role", *KINDS, "together", "process")
    rows = [(str(one.rank), roles[one.rank], *_memory_cells(one), megabytes(processes.get(one.rank))) for one in found]
    return [
        f"  memory of tensors in step {', '.join(map(str, steps))}, MB: the most of each at any moment",
        *render_table([heading, *rows], right=range(2, len(heading)), indent="    "),
    ]


def memory_lines(found: Sequence[RankMemory], roles: Sequence[str]) -> list[str]:
    """Render memory as lines with tabs, one for each rank."""
    return [tabbed(("memory", one.rank, roles[one.rank], *_memory_cells(one))) for one in found]


def _memory_cells(one: RankMemory) -> tuple[str, ...]:
    return tuple(megabytes(size) for size in (*one.sizes.values(), one.peak))


def megabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e6:,.2f}"


_COST_HEADING = (
    "operation",
    "role",
    "messages/step",
    "bytes/step",
    "waited ms",
    "p90 ms",
    "of step",
    "in flight ms",
    "MB/s",
)


def render_communication(costs: Sequence[OperationCost]) -> list[str]:
    """Render a table of the costs of operations; the last two columns appear only for a traced run."""
    is_traced = any(cost.flight is not None for cost in costs)
    rows = [_COST_HEADING, *map(_cost_cells, costs)]
    shown = rows if is_traced else [row[:-2] for row in rows]
    hint = () if is_traced else ("", "`ttlaunch run … --trace-steps 5` also measures how long messages are under way")
    return [*render_table(shown, right=range(2, len(shown[0]))), *hint]


def communication_lines(costs: Sequence[OperationCost]) -> list[str]:
    """Render the costs of operations as lines with tabs."""
    return [tabbed(("communication", *_cost_cells(cost))) for cost in costs]


def _cost_cells(cost: OperationCost) -> tuple[str, ...]:
    waited, flight = cost.waited, cost.flight
    return (
        cost.operation,
        cost.role,
        f"{cost.messages:,.2f}".rstrip("0").rstrip("."),
        f"{cost.size:,.0f}",
        f"{waited.median * 1e3:,.2f}" if waited else "–",
        f"{waited.p90 * 1e3:,.2f}" if waited else "–",
        f"{waited.share:.1%}" if waited else "–",
        f"{flight.median_s * 1e3:,.2f}" if flight else "–",
        f"{flight.bytes_per_s / 1e6:,.0f}" if flight else "–",
    )
