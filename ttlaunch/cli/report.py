"""`ttlaunch report`: show the measured traffic of a run beside the recipe's formula, and where its time went."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch.app.named_run import find_named_run, unreadable_run
from ttlaunch.cli.console import print_json, print_lines, show_diagnostics, tabbed, write_picture
from ttlaunch.cli.options import NamedRun, RunsDir
from ttlaunch.diagnostics import Format, counted, shown

if TYPE_CHECKING:
    from ttlaunch.running.metrics.communication import OperationCost
    from ttlaunch.running.metrics.times import StepTimes
    from ttlaunch.running.readers.recorded import Recorded
    from ttlaunch.running.watch import RankState

EXAMPLES = """\
[bold]ttlaunch report[/bold]   the newest run: its start, bytes by operation and pair of ranks, and the time of a step

[bold]ttlaunch report 2026-08-23T10-14-07-3fa1[/bold]   a run by its id or the path of its folder

[bold]ttlaunch report --communication[/bold]   the cost of each operation: messages, bytes, waiting time

[bold]ttlaunch report --plot[/bold]   the losses as curves, in the terminal

[bold]ttlaunch report --out loss.svg[/bold]   the losses over steps, seconds and bytes, as a picture

[bold]ttlaunch report latest --format json[/bold]   all of this as JSON, with times by rank instead of by role
"""


def report(
    run: NamedRun = "latest",
    *,
    communication: Annotated[
        bool,
        typer.Option(
            "--communication",
            help="Show each operation: messages, bytes, waiting time, and for a traced run the time in flight.",
        ),
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the losses over the steps in the terminal.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write a picture of the losses over steps, seconds and bytes to an SVG file.",
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="full: tables; concise: tab-separated lines for the start, traffic, times, memory and last operations; json: also what `--communication` shows; github: tables and CI annotations.",
        ),
    ] = Format.FULL,
) -> None:
    """Show what a run sent, compared with the recipe's formula, and where its start and its steps spent their time."""
    from ttlaunch.app.run_diagnostics import lost_output_diagnostics, traffic_diagnostics

    recorded = _read(run, runs_dir)
    if plot or svg is not None:
        _show_losses(recorded, plot=plot, svg=svg, form=form)
        return
    found = [
        *lost_output_diagnostics((recorded.report or {}).get("ranks") or ()),
        *traffic_diagnostics(recorded.traffic, _roles(recorded)),
    ]
    if form is Format.JSON:
        print_json({**_as_json(recorded), "diagnostics": [one.as_json() for one in found]}, schema="report")
        return
    if communication:
        _show_communication(recorded, form=form)
        return
    lines = _concise_lines(recorded) if form is Format.CONCISE else _lines(recorded)
    print_lines(lines)
    show_diagnostics(found, form=form)


def _show_losses(recorded: "Recorded", *, plot: bool, svg: Path | None, form: Format) -> None:
    """Draw the losses in the terminal, or write them to a file as a picture; with JSON, print them."""
    from ttlaunch.cli.loss_picture import draw_losses, plot_losses
    from ttlaunch.running.readers.losses import read_losses
    from ttlaunch.running.readers.recorded import bytes_per_step

    losses = read_losses(recorded)
    if svg is not None:
        write_picture(svg, draw_losses(recorded.name, losses, bytes_per_step=bytes_per_step(recorded)[0]))
    named = (("training", losses.training), ("validation", losses.validation))
    if form is Format.JSON:
        points_by_kind = {kind: [vars(one) for one in points] for kind, points in named}
        print_json({"run_id": recorded.path.name, **points_by_kind}, schema="losses")
    elif form is Format.CONCISE:
        print_lines(tabbed((kind, *vars(one).values())) for kind, points in named for one in points)
    else:
        wrote = [] if svg is None else [f"wrote {svg}"]
        print_lines([*_heading(recorded), "", *plot_losses(losses), *wrote] if plot else wrote)


def _show_communication(recorded: "Recorded", *, form: Format) -> None:
    from ttlaunch.cli.report_tables import communication_lines, render_communication

    costs = _communication(recorded)
    if form is Format.CONCISE:
        lines = communication_lines(costs)
    elif costs:
        lines = [*_heading(recorded), "", *render_communication(costs)]
    else:
        nothing = _without_telemetry(recorded) if recorded.telemetry is None else "no rank sent anything"
        lines = [*_heading(recorded), "", f"  {nothing}"]
    print_lines(lines)


def _communication(recorded: "Recorded") -> "list[OperationCost]":
    from ttlaunch.running.metrics.communication import communication_costs

    rows = [state.row for state in recorded.ranks]
    return communication_costs(recorded.telemetry or (), rows, folder=recorded.path)


def _read(where: str, runs_dir: Path) -> "Recorded":
    from ttlaunch.running.readers.recorded import read_run

    path = find_named_run(where, runs_dir=runs_dir)
    try:
        return read_run(path)
    except (OSError, ValueError) as error:
        raise unreadable_run(path, error) from error


def _heading(recorded: "Recorded") -> list[str]:
    """Render the lines with the run's name and how it ended."""
    from ttlaunch.app.run_spec import short_name
    from ttlaunch.running.watch import render_speed

    layout = f" ({recorded.plan['layout']})" if recorded.plan.get("layout") else ""
    steps = max((state.step for state in recorded.ranks), default=0)
    present = sum(not state.row.later or state.started is not None or state.step > 0 for state in recorded.ranks)
    lines = [f"{recorded.status}: {recorded.name}{layout}, {counted(present, 'rank')}, {steps} steps"]
    ended_by = _ended_by(recorded)
    lines += [f"  {'ended by' if recorded.report else 'state':12}{ended_by}"] if ended_by else []
    fastest = max(recorded.ranks, key=lambda state: state.tokens_per_s or state.samples_per_s or 0, default=None)
    speed = render_speed(fastest) if fastest is not None else ""
    lines += [f"  {'speed':12}{speed}"] if speed else []
    lines.append(f"  {'run folder':12}{short_name(recorded.path, Path.cwd())}")
    return lines


def _lines(recorded: "Recorded") -> list[str]:
    from ttlaunch.cli.report_tables import (
        render_edges,
        render_epochs,
        render_memory,
        render_served,
        render_start,
        render_times,
    )
    from ttlaunch.running.metrics.served import served_work
    from ttlaunch.running.metrics.telemetry import memory_of_ranks

    lines = _heading(recorded)
    lines += ["", *render_start(recorded.start)] if recorded.start else []
    epochs = (recorded.report or {}).get("epochs")
    lines += ["", *render_epochs(epochs)] if epochs else []
    lasts = _last_operations(recorded)
    if lasts:
        lines += ["", "  last operations of each rank, from its flight recorder"]
        lines += [f"    {who:{max(map(len, lasts))}}  {text}" for who, text in lasts.items()]
    if metrics := _last_metrics(recorded):
        lines += ["", "  last numbers that each rank printed or sent"]
        lines += [f"    {who:{max(map(len, metrics))}}  {text}" for who, text in metrics.items()]
    if recorded.traffic is None or recorded.telemetry is None:
        return [*lines, "", "  " + _without_telemetry(recorded)]
    work = served_work(recorded.telemetry)
    lines += ["", *render_served(work, _roles(recorded))] if work else []
    lines += ["", *render_edges(recorded.traffic, _roles(recorded), tokens=work.tokens if work else None)]
    times, memory = _by_role(recorded), memory_of_ranks(recorded.telemetry)
    lines += ["", *render_times(times)] if times else []
    return [*lines, "", *render_memory(memory, _roles(recorded), _peak_memory(recorded))] if memory else lines


def _concise_lines(recorded: "Recorded") -> list[str]:
    from ttlaunch.cli.report_tables import edge_lines, epoch_lines, memory_lines, served_lines, start_lines, time_lines
    from ttlaunch.running.metrics.served import served_work
    from ttlaunch.running.metrics.telemetry import memory_of_ranks

    lasts = [tabbed(("last", who, text)) for who, text in _last_operations(recorded).items()]
    metrics = [tabbed(("metrics", who, text)) for who, text in _last_metrics(recorded).items()]
    lasts = [*(start_lines(recorded.start) if recorded.start else ()), *lasts, *metrics]
    lasts += epoch_lines((recorded.report or {}).get("epochs") or ())
    if recorded.traffic is None or recorded.telemetry is None:
        return [*lasts, _without_telemetry(recorded)]
    work = served_work(recorded.telemetry)
    return [
        *lasts,
        *(served_lines(work, _roles(recorded)) if work else ()),
        *edge_lines(recorded.traffic, _roles(recorded)),
        *time_lines(_by_role(recorded)),
        *memory_lines(memory_of_ranks(recorded.telemetry), _roles(recorded)),
    ]


def _roles(recorded: "Recorded") -> list[str]:
    return [state.row.role for state in recorded.ranks]


def _peak_memory(recorded: "Recorded") -> dict[int, int]:
    """Return the peak memory of each rank's process, without ranks that have not ended."""
    rows = (recorded.report or {}).get("ranks") or ()
    return {row["rank"]: row["peak_memory_bytes"] for row in rows if row.get("peak_memory_bytes")}


def _last_operations(recorded: "Recorded") -> dict[str, str]:
    """Return the last operation of each rank before the run failed or hung, if it is known."""
    rows = (recorded.report or {}).get("ranks") or ()
    if recorded.status not in {"failed", "hung"}:
        return {}
    return {f"{row['rank']} {row['role']}": row["last_operation"]["text"] for row in rows if row.get("last_operation")}


def _last_metrics(recorded: "Recorded") -> dict[str, str]:
    """Render the last value of each number that a script's ranks printed or sent."""
    found = {}
    for state in recorded.ranks:
        step = state.step or state.printed_step
        values = [
            f"{name}={value if isinstance(value, str) else f'{value:.4g}'}"
            for name, value in _metrics(recorded, state).items()
        ]
        if values:
            found[f"{state.row.rank} {state.row.role}"] = " ".join([f"step={step}"] * bool(step) + values)
    return found


def _metrics(recorded: "Recorded", state: "RankState") -> dict[str, float | str]:
    """Return these values of a rank, NaN and infinities as text; none of a recipe, which has tables of its own."""
    values = state.metrics if recorded.plan.get("recipe") is None else {}
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def _ended_by(recorded: "Recorded") -> str:
    """Describe what ended the run; empty if it completed."""
    from ttlaunch.running.failures.failure import Failure
    from ttlaunch.running.restarts import read_follow_up

    if recorded.report is None or recorded.status == "terminated":
        from ttlaunch.app.slurm_job import why_slurm_ended

        if why := why_slurm_ended(recorded.path):
            return why
    if recorded.report is None:
        if recorded.is_running:
            return "still running; this is what is written so far"
        return "no report was written, and none of its processes is on this machine; its launcher was killed, or it runs elsewhere"
    failure = recorded.report.get("failure")
    if failure:
        known = {name: failure.get(name) for name in ("code", "rank", "role", "host", "step", "cause", "when")}
        return f"{failure['code']}: {Failure(**known, time=None).message}"
    follow_up = read_follow_up(recorded.path)
    if follow_up.get("requeued"):
        return f"the time limit of Slurm job {shown(str(follow_up['requeued']))}, which was started again"
    signals = {"interrupted": "Ctrl-C", "terminated": "SIGTERM", "time limit": "the time limit of the batch system"}
    return signals.get(recorded.status, "")


def _without_telemetry(recorded: "Recorded") -> str:
    """Explain why there are no numbers to show."""
    if recorded.plan.get("elastic"):
        return "bytes and times are not summed up where workers come and go"
    if recorded.report is None and recorded.is_running:
        return "nothing about bytes and times yet: ranks write their telemetry every few seconds"
    if recorded.plan.get("recipe") is None:
        return "nothing about bytes and times: the run was of a program, and only ranks of recipes keep telemetry"
    return "nothing about bytes and times: not every rank kept telemetry; it ended too early, or was made by an older ttlaunch"


def _by_role(recorded: "Recorded") -> dict[str, "StepTimes"]:
    from ttlaunch.running.metrics.times import step_times

    telemetry, found = recorded.telemetry or [], {}
    for role in dict.fromkeys(state.row.role for state in recorded.ranks):
        times = step_times([entry for entry in telemetry if recorded.ranks[entry.rank].row.role == role])
        if times is not None:
            found[role] = times
    return found


def _as_json(recorded: "Recorded") -> dict[str, Any]:
    from ttlaunch.running.metrics.served import served_work
    from ttlaunch.running.metrics.telemetry import memory_of_ranks
    from ttlaunch.running.metrics.times import step_times

    work = served_work(recorded.telemetry or ())
    by_rank = [step_times([entry]) for entry in recorded.telemetry or ()]
    rows = (recorded.report or {}).get("ranks") or ()
    lasts = {row["rank"]: row.get("last_operation") for row in rows}
    return {
        "run_id": recorded.path.name,
        "name": recorded.name,
        "layout": recorded.plan.get("layout"),
        "status": recorded.status,
        "ended_by": _ended_by(recorded),
        "steps": max((state.step for state in recorded.ranks), default=0),
        "tokens_per_s": max((state.tokens_per_s or 0 for state in recorded.ranks), default=0) or None,
        "samples_per_s": max((state.samples_per_s or 0 for state in recorded.ranks), default=0) or None,
        "ranks": [
            {
                "rank": state.row.rank,
                "role": state.row.role,
                "host": state.row.host,
                "last_operation": lasts.get(state.row.rank),
                **({"metrics": metrics} if (metrics := _metrics(recorded, state)) else {}),
            }
            for state in recorded.ranks
        ],
        **({"start_times": recorded.start.as_json()} if recorded.start else {}),
        **({"epochs": epochs} if (epochs := (recorded.report or {}).get("epochs")) else {}),
        **({"served": work.as_json()} if work else {}),
        "traffic": recorded.traffic.as_json() if recorded.traffic else None,
        "communication": [cost.as_json() for cost in _communication(recorded)],
        "memory": [one.as_json() for one in memory_of_ranks(recorded.telemetry or ())],
        "times": [times.as_json() for times in by_rank if times is not None],
    }
