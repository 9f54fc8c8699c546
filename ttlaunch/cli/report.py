"""`ttlaunch report`: show the measured traffic of a run beside the recipe's formula, and where its time went."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch.app.named_run import find_named_run, unreadable_run
from ttlaunch.cli.console import print_json, print_lines, show_diagnostics, tabbed, write_picture
from ttlaunch.cli.options import NamedRun, RunsDir
from ttlaunch.diagnostics import Format, counted

if TYPE_CHECKING:
    from ttlaunch.running.readers.recorded import Recorded

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
    from ttlaunch.app.measured import report_as_json, report_diagnostics

    recorded = _read(run, runs_dir)
    if plot or svg is not None:
        _show_losses(recorded, plot=plot, svg=svg, form=form)
        return
    found = report_diagnostics(recorded)
    if form is Format.JSON:
        from ttlaunch.app.predict import judge_run

        content = {**report_as_json(recorded), "verdict": judge_run(recorded).as_json()}
        print_json({**content, "diagnostics": [one.as_json() for one in found]}, schema="report")
        return
    if communication:
        _show_communication(recorded, form=form)
        return
    lines = _concise_lines(recorded) if form is Format.CONCISE else _lines(recorded)
    print_lines(lines)
    if form is not Format.CONCISE and recorded.traffic is not None:
        print_lines(_verdict_lines(recorded))  # after the rest, because a first prediction takes some seconds
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
    from ttlaunch.app.measured import communication_of, why_no_telemetry
    from ttlaunch.cli.report_tables import communication_lines, render_communication

    costs = communication_of(recorded)
    if form is Format.CONCISE:
        lines = communication_lines(costs)
    elif costs:
        lines = [*_heading(recorded), "", *render_communication(costs)]
    else:
        nothing = why_no_telemetry(recorded) if recorded.telemetry is None else "no rank sent anything"
        lines = [*_heading(recorded), "", f"  {nothing}"]
    print_lines(lines)


def _read(where: str, runs_dir: Path) -> "Recorded":
    from ttlaunch.running.readers.recorded import read_run

    path = find_named_run(where, runs_dir=runs_dir)
    try:
        return read_run(path)
    except (OSError, ValueError) as error:
        raise unreadable_run(path, error) from error


def _heading(recorded: "Recorded") -> list[str]:
    """Render the lines with the run's name and how it ended."""
    from ttlaunch.app.measured import ended_by
    from ttlaunch.app.run_spec import short_name
    from ttlaunch.running.speed import render_speed

    layout = f" ({recorded.plan['layout']})" if recorded.plan.get("layout") else ""
    steps = max((state.step for state in recorded.ranks), default=0)
    present = sum(not state.row.later or state.started is not None or state.step > 0 for state in recorded.ranks)
    lines = [f"{recorded.status}: {recorded.name}{layout}, {counted(present, 'rank')}, {steps} steps"]
    end = ended_by(recorded)
    lines += [f"  {'ended by' if recorded.report else 'state':12}{end}"] if end else []
    fastest = max(recorded.ranks, key=lambda state: state.tokens_per_s or state.samples_per_s or 0, default=None)
    speed = render_speed(fastest) if fastest is not None else ""
    lines += [f"  {'speed':12}{speed}"] if speed else []
    lines.append(f"  {'run folder':12}{short_name(recorded.path, Path.cwd())}")
    return lines


def _lines(recorded: "Recorded") -> list[str]:
    from ttlaunch.app.measured import epochs_of, last_operations_of, times_by_role, waits_of, why_no_telemetry
    from ttlaunch.app.predict import peaks_of
    from ttlaunch.cli.report_tables import (
        render_edges,
        render_epochs,
        render_memory,
        render_served,
        render_start,
        render_times,
        render_waits,
    )
    from ttlaunch.running.metrics.served import served_work
    from ttlaunch.running.metrics.telemetry import memory_of_ranks

    lines = _heading(recorded)
    lines += ["", *render_start(recorded.start)] if recorded.start else []
    epochs, waits = epochs_of(recorded), waits_of(recorded)
    lines += ["", *render_epochs(epochs)] if epochs else []
    lines += ["", *render_waits(waits)] if waits else []
    lasts = last_operations_of(recorded)
    if lasts:
        lines += ["", "  last operations of each rank, from its flight recorder"]
        lines += [f"    {who:{max(map(len, lasts))}}  {text}" for who, text in lasts.items()]
    if metrics := _last_metrics(recorded):
        lines += ["", "  last numbers that each rank printed or sent"]
        lines += [f"    {who:{max(map(len, metrics))}}  {text}" for who, text in metrics.items()]
    if recorded.traffic is None or recorded.telemetry is None:
        return [*lines, "", "  " + why_no_telemetry(recorded)]
    work = served_work(recorded.telemetry)
    lines += ["", *render_served(work, _roles(recorded))] if work else []
    lines += ["", *render_edges(recorded.traffic, _roles(recorded), tokens=work.tokens if work else None)]
    times, memory = times_by_role(recorded), memory_of_ranks(recorded.telemetry)
    lines += ["", *render_times(times)] if times else []
    lines += ["", *render_memory(memory, _roles(recorded), peaks_of(recorded))] if memory else []
    return lines


def _verdict_lines(recorded: "Recorded") -> list[str]:
    from ttlaunch.app.predict import judge_run
    from ttlaunch.cli.prediction_view import render_verdict

    return render_verdict(judge_run(recorded), _roles(recorded))


def _concise_lines(recorded: "Recorded") -> list[str]:
    from ttlaunch.app.measured import epochs_of, last_operations_of, times_by_role, waits_of, why_no_telemetry
    from ttlaunch.cli.report_tables import (
        edge_lines,
        epoch_lines,
        memory_lines,
        served_lines,
        start_lines,
        time_lines,
        wait_lines,
    )
    from ttlaunch.running.metrics.served import served_work
    from ttlaunch.running.metrics.telemetry import memory_of_ranks

    lasts = [tabbed(("last", who, text)) for who, text in last_operations_of(recorded).items()]
    metrics = [tabbed(("metrics", who, text)) for who, text in _last_metrics(recorded).items()]
    lasts = [*(start_lines(recorded.start) if recorded.start else ()), *lasts, *metrics]
    lasts += [*epoch_lines(epochs_of(recorded)), *wait_lines(waits_of(recorded))]
    if recorded.traffic is None or recorded.telemetry is None:
        return [*lasts, why_no_telemetry(recorded)]
    work = served_work(recorded.telemetry)
    return [
        *lasts,
        *(served_lines(work, _roles(recorded)) if work else ()),
        *edge_lines(recorded.traffic, _roles(recorded)),
        *time_lines(times_by_role(recorded)),
        *memory_lines(memory_of_ranks(recorded.telemetry), _roles(recorded)),
    ]


def _roles(recorded: "Recorded") -> list[str]:
    return [state.row.role for state in recorded.ranks]


def _last_metrics(recorded: "Recorded") -> dict[str, str]:
    """Render the last value of each number that a script's ranks printed or sent."""
    from ttlaunch.app.measured import last_metrics

    found = {}
    for state in recorded.ranks:
        step = state.step or state.printed_step
        values = [
            f"{name}={value if isinstance(value, str) else f'{value:.4g}'}"
            for name, value in last_metrics(recorded, state).items()
        ]
        if values:
            found[f"{state.row.rank} {state.row.role}"] = " ".join([f"step={step}"] * bool(step) + values)
    return found
