"""`ttlaunch plan`: show what would be started, rank by rank, and write the files that start it by hand."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.console import print_json, print_lines, print_text, tabbed
from ttlaunch.cli.options import CLUSTER, SLURM, TORCHRUN, OutputFormat, Verbose, asks_for
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import Format, counted, file_error

if TYPE_CHECKING:
    from ttlaunch.app.predict import NotPredicted
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.planning.launch_plan import LaunchPlan, RankRow
    from ttlaunch.running.metrics.time_prediction import TimePrediction

_HEADING = ("rank", "role", "host", "slot", "mesh", "devices")
_FLOWS = {
    "chain": "{} → next {}",
    "ends": "first {} ↔ last {} of a row",
    "row": "{} ↔ every other {} of its row",
    "column": "{} ↔ {} at its place in other rows",
}
EXAMPLES = """\
[bold]ttlaunch plan hierarchical_parallel[/bold]   which rank does what, and where

[bold]ttlaunch plan zero --predict[/bold]   and how much memory each rank will take, and what it will send

[bold]ttlaunch plan zero --predict --step-time[/bold]   and how long a step will take, rehearsed here for some seconds

[bold]ttlaunch plan data_parallel --fits 24GB[/bold]   and whether that is too much, and what would fit

[bold]ttlaunch plan fabric_minimal --on 5loudboxes --out launch/[/bold]   write the files and a command.sh to start by hand
"""


@asks_for("target", "arguments", *CLUSTER, "elastic", "audit", "naive", "independent", "env", *TORCHRUN, *SLURM, "warm")
def plan(
    *,
    spec: RunSpec,
    write: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write plan.json, the engine's files and command.sh."),
    ] = None,
    predicts: Annotated[
        bool,
        typer.Option("--predict", help="Predict the memory of each rank and the bytes between ranks; takes seconds."),
    ] = False,
    time: Annotated[
        bool,
        typer.Option(
            "--step-time",
            help="Also predict the time of a step. Unless this host has been calibrated for the plan, rehearse it first, for up to 10 s.",
        ),
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="As --step-time, but rehearse the plan again even if a calibration is kept."),
    ] = False,
    fits: Annotated[
        str | None,
        typer.Option(
            "--fits",
            metavar="SIZE",
            help="Also say whether each rank fits into this memory, such as 24GB, and what would.",
        ),
    ] = None,
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Show a run's hosts, slots, meshes, roles and flows, without starting it."""
    from ttlaunch.app.prepare_run import prepare
    from ttlaunch.cli.dialogue import TerminalDialogue

    dialogue = TerminalDialogue(form, verbose=verbose)
    limit = None if fits is None else _limit(fits)
    prepared = prepare(spec, dialogue)
    warnings = dialogue.warnings_as_json()
    asks_time = time or calibrate
    if predicts or asks_time or limit is not None:
        found_time = _predicted_time(prepared.plan, asked=asks_time, anew=calibrate)
        _show_predicted(prepared, form=form, diagnostics=warnings, limit=limit, time=found_time)
    else:
        remarks = prepared.description.remarks
        show_plan(prepared.plan, form=form, remarks=remarks, diagnostics=warnings, script=_script(prepared))
    if write is not None:
        _write(prepared.plan, write, form)


def _script(prepared: "PreparedRun") -> str | None:
    """Return what `submit` would hand to Slurm, if the run has no hosts yet."""
    if prepared.description.slurm is None:
        return None
    from ttlaunch.app.submit import planned_script

    return planned_script(prepared)


def _limit(text: str) -> int:
    from ttlaunch.app.fits import parse_limit

    return parse_limit(text)


def _predicted_time(plan: "LaunchPlan", *, asked: bool, anew: bool) -> "TimePrediction | NotPredicted | None":
    """Return the time of a step; if it was not asked for, only what a calibration that is kept says."""
    if asked:
        from ttlaunch.app.calibrate import predict_time

        return predict_time(plan, anew=anew)
    from ttlaunch.planning.launch_plan import RecipeProgram
    from ttlaunch.running.metrics.time_prediction import predicted_time

    return predicted_time(plan.as_json()) if isinstance(plan.program, RecipeProgram) else None


def _show_predicted(
    prepared: "PreparedRun",
    *,
    form: Format,
    diagnostics: Sequence[Mapping[str, Any]],
    limit: int | None,
    time: "TimePrediction | NotPredicted | None",
) -> None:
    """Print the plan, and below it what it will hold and send, how long a step takes, and with a limit whether each rank fits."""
    from ttlaunch.app.fits import find_fit
    from ttlaunch.app.predict import NotPredicted, predict
    from ttlaunch.cli.prediction_view import (
        fit_as_json,
        prediction_as_json,
        prediction_lines,
        render_fit,
        render_prediction,
    )
    from ttlaunch.cli.time_view import render_time, time_as_json, time_lines

    plan = prepared.plan
    found = predict(plan)
    fit = None
    if limit is not None and not isinstance(found, NotPredicted):
        fit = find_fit(prepared.request, plan.as_json()["config"], found, limit=limit)
    more = {**prediction_as_json(found), **time_as_json(time), **fit_as_json(fit)}
    remarks, script = prepared.description.remarks, _script(prepared)
    show_plan(plan, form=form, remarks=remarks, diagnostics=diagnostics, script=script, more=more)
    if form is Format.CONCISE:
        print_lines(map(tabbed, [*prediction_lines(found, fit), *time_lines(time)]))
    elif form is not Format.JSON:
        print_lines([*render_prediction(found), *render_time(time), *render_fit(fit)])


def show_plan(
    plan: "LaunchPlan",
    *,
    form: Format,
    remarks: Sequence[str],
    diagnostics: Sequence[Mapping[str, Any]],
    script: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print the plan: a table, one line per rank, or JSON; and what options changed besides what they name.

    `diagnostics` are the warnings, which only JSON contains, as it does `more`: they have been shown otherwise. `script` is
    the batch script of a run that waits for Slurm's hosts.
    """
    if form is Format.JSON:
        added = {**({} if script is None else {"script": script}), **(more or {})}
        content = {**plan.as_json(), "remarks": list(remarks), **added, "diagnostics": list(diagnostics)}
        print_json(content, schema="plan")
        return
    if form is Format.CONCISE:
        for row in plan.first_ranks:
            mesh = "-" if row.mesh_id is None else str(row.mesh_id)
            print_lines([tabbed((row.rank, row.role, row.host, row.slot, mesh))])
        return
    layout = getattr(plan.program, "layout", None)
    title = f"{plan.program.name} ({layout})" if layout else plan.program.name
    size = f"{counted(len(plan.first_ranks), 'rank')} on {counted(len(plan.hosts), 'host')}"
    print_lines(
        [
            f"{title} on {plan.topology}: {size}, {plan.engine.name}",
            *render_table([_HEADING, *map(_cells, plan.first_ranks)], right={0, 3, 4}),
            *(
                f"flow  {_FLOWS.get(pattern, '{} ↔ {}').format(source, target)}"
                for source, target, pattern in plan.flows
            ),
            *(f"link  mesh {a} — mesh {b}, {counted(channels, 'channel')}" for a, b, channels in plan.links),
            *_elastic(plan),
            *_audits(plan),
            *(f"note  {remark}" for remark in remarks),
            f"plan  {plan.hash[:16]}",
        ]
    )
    if script is not None:
        print_lines(["", "job.sbatch, as `ttlaunch submit` gives it to Slurm:"])
        print_text(script)


def _elastic(plan: "LaunchPlan") -> list[str]:
    limits = plan.elastic
    if limits is None:
        return []
    number = f"{limits.minimum} to {limits.maximum}" if limits.minimum < limits.maximum else str(limits.minimum)
    more = plan.world_size - limits.first
    lines = [f"elastic  {number} workers make a step; {more} more can start, each in place of one that has ended"]
    if limits.shadow_bytes:
        members = min(limits.first, limits.maximum)  # spares keep nothing
        each = f", {limits.shadow_bytes / members:.1f} with {counted(members, 'worker')}"
        each = each if limits.slots == 0 else ""
        where = "each worker keeps as a shadow" if limits.slots == 0 else "shadows keep"
        total = f"{limits.shadow_bytes} / W bytes" if limits.slots == 0 else f"{limits.shadow_bytes} bytes"
        lines.append(f"elastic  {where} {total} of each parameter{each}; nothing is kept of the step before")
    if limits.kept_bytes:
        each = f"{limits.kept_bytes} bytes of each parameter"
        lines.append(
            f"elastic  each worker keeps {each} of the last step, for one that lacks it, and copies of its part of the sums, and of the state for one that comes"
        )
    if limits.first > limits.maximum:
        spares = counted(limits.first - limits.maximum, "spare")
        lines.append(
            f"elastic  {limits.first} workers start: {spares} without work until one of the others ends or leaves"
        )
    return lines


def _audits(plan: "LaunchPlan") -> list[str]:
    training = getattr(plan.program, "config", {}).get("training_config") or {}
    interval = training.get("audit_interval")
    if interval is None:
        return []
    from ttlaunch.planning.audits import cost_of_audits

    return [f"audits  {cost_of_audits(interval)}"]


def _cells(row: "RankRow") -> tuple[str, ...]:
    mesh = "–" if row.mesh_id is None else str(row.mesh_id)
    devices = "–" if row.device_shape is None else f"{row.device_shape[0]} × {row.device_shape[1]}"
    return str(row.rank), row.role, row.host, str(row.slot), mesh, devices


def _write(plan: "LaunchPlan", folder: Path, form: Format) -> None:
    from ttlaunch.running.runs.run_folder import write_plan

    try:
        paths = write_plan(plan, folder)
    except OSError as error:
        raise file_error(folder, error) from error
    if form is not Format.JSON:
        where = "" if plan.engine.by_hand is None else ", on hosts that all see this folder under the same path"
        print_lines([f"wrote {len(paths)} files; start it with: sh {shlex.quote(str(paths[-1]))}{where}"])
