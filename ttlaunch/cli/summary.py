"""Print the result of a run in a few lines."""

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ttlaunch import contract
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.report import Report
from ttlaunch.app.run_diagnostics import lost_steps
from ttlaunch.app.run_spec import short_name
from ttlaunch.cli.console import discarding_unwritable, print_json, print_lines, show_diagnostics
from ttlaunch.diagnostics import Diagnostic, Format, counted, render_duration
from ttlaunch.profiling import profile_file
from ttlaunch.running.report import Report as RecordedReport
from ttlaunch.running.runs.facts import RunFacts
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.speed import render_speed

_EXACT_S = 60.0


def print_result(
    outcome: Outcome,
    *,
    form: Format,
    more: Sequence[Diagnostic] = (),
    restarts: Sequence[Outcome] = (),
    exit_status: int | None = None,
) -> None:
    """Print the result of a run and its diagnostics.

    Args:
        outcome: The outcome of the run; if it was restarted, that of the last start.
        form: The form of the output.
        more: Further diagnostics to print.
        restarts: The outcomes of the starts before, which are part of the JSON.
        exit_status: The exit status of the command, if it differs from that of the run.
    """
    told = Report.of([*restarts, outcome], more=more, status=exit_status)
    report, facts, folder = outcome.report, outcome.facts, outcome.folder
    if form is Format.JSON:
        print_json(told.as_json(), schema="run")
    else:
        timeline = folder.file(contract.TRACE_FILE)
        with discarding_unwritable(sys.stdout):
            show_summary(report, facts, folder, timeline=timeline if timeline.is_file() else None)
            if report.status == "done" and form is Format.FULL:
                print_lines(_next_steps(report, facts, folder))
        show_diagnostics(told.diagnostics, form=form)


def show_summary(report: RecordedReport, facts: RunFacts, folder: RunFolder, *, timeline: Path | None = None) -> None:
    """Print the summary of a run."""
    lines = [*_heading(report, facts), *_steps(report), *_epochs(report), *_render_stop(report)]
    if report.first_validation is not None and report.last_validation is not None:
        first, last = report.first_validation, report.last_validation
        change = f" ({(last / first - 1) * 100:+.0f} %)" if first and math.isfinite(last / first) else ""
        only = first == last
        lines.append(
            f"  validation loss  {last:.4f}"
            if only
            else f"  validation loss  {first:.4f} first, {last:.4f} last{change}"
        )
    if report.last_perplexity is not None:
        lines.append(f"  perplexity       {report.last_perplexity:,.4g}")
    if speed := render_speed(report):
        lines.append(f"  speed            {speed}")
    width = max(16, *(len(name) for name in report.results)) if report.results else 0
    lines += [f"  {name:{width}} {_plain(value)}" for name, value in report.results.items()]
    if report.parameters_sha256:
        agree = "" if report.parameters_agree else " (ranks DISAGREE)"
        lines.append(f"  parameters       sha256 {report.parameters_sha256}{agree}")
    if report.lost_checkpoints:
        lines.append(f"  no checkpoint of {lost_steps(report)}")
    if report.leftovers:
        lines.append(
            f"  left behind      {report.leftovers} {'process' if report.leftovers == 1 else 'processes'}, killed"
        )
    if timeline is not None:
        lines.append(f"  timeline         {short_name(timeline, Path.cwd())}, for https://ui.perfetto.dev")
    profiles = [rank["rank"] for rank in report.ranks if folder.file(profile_file(rank["rank"])).is_file()]
    if profiles:
        place = short_name(folder.file(profile_file(profiles[0])), Path.cwd())
        more = f" and {len(profiles) - 1} more" if profiles[1:] else ""
        lines.append(f"  torch's profile  {place}{more}, for https://ui.perfetto.dev")
    lines.append(f"  run folder       {short_name(folder.path, Path.cwd())}")
    print_lines(lines)


def _next_steps(report: RecordedReport, facts: RunFacts, folder: RunFolder) -> list[str]:
    """Render the commands that a user may want after a run that has completed."""
    from ttlaunch.running.checkpoints.complete import newest_step
    from ttlaunch.running.runs.facts import matching_runs, run_folders

    end = folder.run_id.rpartition("-")[2]
    is_enough = matching_runs(end, run_folders(Path("runs").absolute())) == [folder.path]
    run = shlex.quote(end if is_enough else short_name(folder.path, Path.cwd()))
    steps = [f"ttlaunch report {run}"] if facts.is_recipe else [f"ttlaunch logs {run}"]
    if report.last_validation is not None:
        steps.append(f"ttlaunch report {run} --plot")
    if newest_step(folder.path) is not None:
        steps.append(f"ttlaunch weights export {run} weights.safetensors")
    return [f"  {'' if number else 'next':16} {step}" for number, step in enumerate(steps)]


def _heading(report: RecordedReport, facts: RunFacts) -> list[str]:
    """Render how the run ended and how long it took."""
    layout = f" ({report.layout})" if report.layout else ""
    lines = [
        f"{report.status}: {report.name}{layout} on {facts.topology}, {counted(report.world_size, 'rank')}, {_lasted(report.duration_s)}"
    ]
    if facts.is_recipe and report.startup_s is not None:
        work_s, work = max(0.0, report.duration_s - report.startup_s), "serving" if facts.is_serving else "training"
        lines.append(f"  time             {_lasted(report.startup_s)} start-up, {_lasted(work_s)} {work}")
    return lines


def _lasted(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < _EXACT_S else render_duration(seconds)


def _steps(report: RecordedReport) -> list[str]:
    """Render the number of steps, and what the run began from."""
    lines = [f"  steps            {report.steps}"] if report.steps else []
    if report.began_from:
        saved_by = report.began_from.get("saved_by")
        by = f", from the memory of {saved_by}" if isinstance(saved_by, str) else ""
        lines.append(f"  began from       {short_name(Path(report.began_from['origin']), Path.cwd())}{by}")
        if report.status == "done" and not report.steps:
            lines.append(f"  steps            none: nothing is left to train after step {report.began_from['step']}")
    return lines


def _epochs(report: RecordedReport) -> list[str]:
    """Render how often the members of an elastic run have changed."""
    if not report.epochs:
        return []
    sizes = [len(epoch["members"]) for epoch in report.epochs]
    number = str(min(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    lost = sum(int(epoch.get("lost_steps", 0)) for epoch in report.epochs)
    lines = [f"  steps lost       {lost} with workers that left between two averages"] if lost else []
    return [f"  epochs           {len(report.epochs)}, with {number} workers", *lines]


def _render_stop(report: RecordedReport) -> list[str]:
    """Render the saved step and how to resume; empty if the run was not stopped or saved nothing."""
    stop = report.stopped or {}
    saved, again = stop.get("saved_step"), stop.get("resume")
    lines = [f"  saved            step {saved}"] if saved is not None else []
    return [*lines, f"  go on with       {again}"] if again else lines


def _plain(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
