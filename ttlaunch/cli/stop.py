"""`ttlaunch stop`: end a run from another terminal, as Ctrl-C in the run's terminal does."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ttlaunch import contract
from ttlaunch.app.named_run import find_named_run, read_launcher_here
from ttlaunch.cli.console import exit_with, print_json, print_lines
from ttlaunch.cli.options import OutputFormat, RunsDir
from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, render_duration

if TYPE_CHECKING:
    from ttlaunch.app.slurm_job import Job

EXAMPLES = """\
[bold]ttlaunch stop latest[/bold]   the newest run; its ranks finish the current step and save a checkpoint first

[bold]ttlaunch stop 3fa1 --grace 5[/bold]   end ranks by force after 5 seconds

[bold]ttlaunch stop latest --now[/bold]   end it without waiting for the step
"""


def stop(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|latest|JOB",
            help="A run's id, a part of it, or a path; or the number of a submitted Slurm job.",
        ),
    ],
    *,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            min=0.0,
            metavar="S",
            help="Seconds to wait before ending ranks by force. Default: the run's own grace.",
        ),
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the step to finish; the same as pressing Ctrl-C three times.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
) -> None:
    """Stop a run, and wait until it has ended."""
    from ttlaunch.app.slurm_job import find_job, job_of_run
    from ttlaunch.app.stop import interrupt
    from ttlaunch.running.runs.launcher import is_running

    job = find_job(run, Path.cwd() / runs_dir) if run.isdecimal() else None
    path = None if job else find_named_run(run, runs_dir=runs_dir)
    job = job_of_run(path) if path else job
    if job:
        _stop_job(job, grace=grace, now=now, form=form)
    assert path is not None  # noqa: S101 - a name that is no job's is a run's
    launcher = read_launcher_here(path, "stop")
    if not is_running(path):
        _say(path, "is not running", form=form, was_running=False)
        return
    began = time.monotonic()
    if launcher is None or not launcher.is_alive:
        _end_processes(path, form=form)
        return

    def say(message: str) -> None:
        if form is not Format.JSON:
            print_lines([f"{path.name}: {message}"])

    if not interrupt(launcher, grace_s=grace, now=now, report=say):
        message = (
            f"the run {path.name} has not ended {render_duration(time.monotonic() - began)} after the request to stop"
        )
        hint = f"`kill -9 {launcher.pid}` ends its launcher, and its ranks with it"
        raise LaunchError([Diagnostic("R048", message, hints=(hint,))])
    _say(path, f"has ended after {time.monotonic() - began:.1f} s", form=form, was_running=True)


def _stop_job(job: "Job", *, grace: float | None, now: bool, form: Format) -> NoReturn:
    """End a job that was submitted to Slurm, and the run that it has started."""
    from ttlaunch.app.stop import stop_job

    name = f"Slurm job {job.number}"

    def say(message: str) -> None:
        if form is not Format.JSON:
            print_lines([f"{name}: {message}"])

    was_running = stop_job(job, grace_s=grace, now=now, report=say)
    if was_running and job.starts:
        _say(job.starts[-1].run, "has ended", form=form, was_running=True)
    if form is Format.JSON:
        print_json({"job": job.number, "was_running": was_running}, schema="stop")
    else:
        print_lines([f"{name} {'has left the queue' if was_running else 'is not running'}"])
    exit_with(contract.STATUS_DONE)


def _end_processes(path: Path, *, form: Format) -> None:
    """Kill the remaining processes of a run whose launcher is gone."""
    from ttlaunch.agent.run_processes import kill_run_processes
    from ttlaunch.running.runs.facts import read_daemons

    killed = len(kill_run_processes(path.name, daemons=read_daemons(path)))
    noun = "process" if killed == 1 else "processes"
    _say(path, f"had lost its launcher; {killed} remaining {noun} killed", form=form, was_running=True)


def _say(path: Path, text: str, *, form: Format, was_running: bool) -> NoReturn:
    from ttlaunch.running.runs.overview import summarise

    (run,) = summarise([path])
    if form is Format.JSON:
        content = {"run_id": path.name, "was_running": was_running, "state": run.state, "step": run.step}
        print_json(content, schema="stop")
    else:
        steps = f" at step {run.step}" if run.step else ""
        print_lines([f"{path.name} {text}: {run.state}{steps}"])
    exit_with(contract.STATUS_DONE)
