"""`ttlaunch stop`: end a run from another terminal, as Ctrl-C in the run's terminal does."""

import time
from pathlib import Path
from typing import Annotated

import typer

from ttlaunch import contract
from ttlaunch.app.named_run import find_named_run, read_launcher_here
from ttlaunch.cli.console import exit_with, print_json, print_lines
from ttlaunch.cli.options import OutputFormat, RunsDir
from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, render_duration

EXAMPLES = """\
[bold]ttlaunch stop latest[/bold]   the newest run; its ranks finish the current step and save a checkpoint first

[bold]ttlaunch stop 3fa1 --grace 5[/bold]   end ranks by force after 5 seconds

[bold]ttlaunch stop latest --now[/bold]   end it without waiting for the step
"""


def stop(
    run: Annotated[str, typer.Argument(metavar="RUN|latest", help="A run's id, a part of it, or a path.")],
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
    from ttlaunch.app.stop import interrupt
    from ttlaunch.running.runs.launcher import is_running

    path = find_named_run(run, runs_dir=runs_dir)
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


def _end_processes(path: Path, *, form: Format) -> None:
    """Kill the remaining processes of a run whose launcher is gone."""
    from ttlaunch.agent.run_processes import kill_run_processes
    from ttlaunch.running.runs.facts import read_daemons

    killed = len(kill_run_processes(path.name, daemons=read_daemons(path)))
    noun = "process" if killed == 1 else "processes"
    _say(path, f"had lost its launcher; {killed} remaining {noun} killed", form=form, was_running=True)


def _say(path: Path, text: str, *, form: Format, was_running: bool) -> None:
    from ttlaunch.running.runs.overview import summarise

    (run,) = summarise([path])
    if form is Format.JSON:
        content = {"run_id": path.name, "was_running": was_running, "state": run.state, "step": run.step}
        print_json(content, schema="stop")
    else:
        steps = f" at step {run.step}" if run.step else ""
        print_lines([f"{path.name} {text}: {run.state}{steps}"])
    exit_with(contract.STATUS_DONE)
