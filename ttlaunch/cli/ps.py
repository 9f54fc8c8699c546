"""`ttlaunch ps`: list this user's runs on this machine with their progress."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttlaunch.cli.console import print_json, print_lines, show_diagnostics, tabbed
from ttlaunch.cli.options import OutputFormat, RunsDir
from ttlaunch.cli.table import render_table
from ttlaunch.diagnostics import Diagnostic, Format, counted, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ttlaunch.app.slurm_job import Job
    from ttlaunch.running.runs.overview import RunSummary

EXAMPLES = """\
[bold]ttlaunch ps[/bold]   runs that are active, from any folder

[bold]ttlaunch ps --all[/bold]   also runs that have ended

[bold]ttlaunch ps --all --format json[/bold]   the same as JSON
"""
_LONGEST = 300
_OF_A_JOB = ("job", "state", "requeued", "run", "name")
_HEADINGS = ("run", "state", "step", "loss", "age", "ranks", "name", "folder")
_ENDS = ((60.0, 1, "s"), (3600.0, 60, "min"), (48 * 3600.0, 3600, "h"))


def ps(
    *,
    every: Annotated[bool, typer.Option("--all", "-a", help="Include runs that have ended.")] = False,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
) -> None:
    """List your runs on this machine and those in the folder of runs, and the jobs that were submitted there."""
    from ttlaunch.app.registering import registry_diagnostic
    from ttlaunch.app.slurm_job import read_jobs
    from ttlaunch.running.runs.overview import list_runs
    from ttlaunch.running.runs.registry import RegistryError, find_registry

    try:
        registry, problem = find_registry(os.environ), None
    except RegistryError as error:
        registry, problem = None, error
    runs, unread = list_runs(Path.cwd() / runs_dir, registry)
    problem = problem or unread
    note = f"only runs in {runs_dir} are shown"
    found: list[Diagnostic] = [registry_diagnostic(problem, note=note)] if problem else []
    listed = [run for run in runs if every or not run.is_over]
    jobs = _jobs(read_jobs(Path.cwd() / runs_dir), every=every)
    if form is Format.JSON:
        lines = [_as_json(run) for run in listed]
        print_json({"runs": lines, "jobs": jobs, "diagnostics": [one.as_json() for one in found]}, schema="ps")
        return
    if listed:
        rows = [_row(run) for run in listed]
        lines_of = (
            [tabbed(row) for row in rows]
            if form is Format.CONCISE
            else render_table([_HEADINGS, *rows], right={2, 3, 4, 5})
        )
        print_lines(lines_of)
    elif form is not Format.CONCISE and not jobs:
        rest = f"; `ttlaunch ps --all` shows {counted(len(runs), 'run')} that ended" if runs else ""
        print_lines([f"no run goes on{rest}"])
    if jobs:
        rows = [[str(job[key] or "") for key in _OF_A_JOB] for job in jobs]
        print_lines(map(tabbed, rows) if form is Format.CONCISE else render_table([_OF_A_JOB, *rows], right={0, 2}))
    show_diagnostics(found, form=form)


def _jobs(known: "Sequence[Job]", *, every: bool) -> list[dict[str, Any]]:
    """Return what Slurm says about submitted jobs that wait or run; given `every`, also about the others."""
    from ttlaunch.app.slurm_job import ask_queue, has_ended

    queue = ask_queue(known)
    return [
        {
            "job": job.number,
            "state": queue.problem or queue.of(job).text,
            "requeued": queue.of(job).restarts,
            "run": job.starts[-1].run.name if job.starts else None,
            "name": job.name,
            "folder": str(job.folder),
        }
        for job in known
        if every or queue.problem or not has_ended(queue.of(job))
    ]


def render_age(seconds: float) -> str:
    """Render a time in its largest whole unit: `12 s`, `5 min`, `7 h`, `3 d`."""
    for end, unit, name in _ENDS:
        if seconds < end:
            return f"{seconds // unit:.0f} {name}"
    return f"{seconds // 86400:.0f} d"


def _row(run: "RunSummary") -> list[str]:
    from ttlaunch.app.run_spec import short_name

    step = f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step or "")
    loss = "" if run.loss is None else f"{run.loss:.4f}"
    age = "" if run.started is None else render_age(max(0.0, time.time() - run.started))
    folder = short_name(run.folder, Path.cwd())
    named = (shown(text, longest=_LONGEST) for text in (run.name, folder))
    return [shown(run.folder.name, longest=_LONGEST), run.state, step, loss, age, str(run.ranks), *named]


def _as_json(run: "RunSummary") -> dict[str, Any]:
    age = None if run.started is None else round(time.time() - run.started, 1)
    return {
        "run_id": run.folder.name,
        "folder": str(run.folder),
        "name": run.name,
        "state": run.state,
        "step": run.step,
        "total_steps": run.total_steps,
        "loss": run.loss,
        "ranks": run.ranks,
        "age_s": age,
        "machine": run.machine,
    }
