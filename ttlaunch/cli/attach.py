"""`ttlaunch attach`: show a detached run from its first line on, or a run that has ended."""

from pathlib import Path

from ttlaunch import contract
from ttlaunch.app.named_run import find_named_run, read_launcher_here, unreadable_run
from ttlaunch.cli.console import exit_with
from ttlaunch.cli.options import NamedRun, Only, OutputFormat, RunsDir
from ttlaunch.diagnostics import Format

EXAMPLES = """\
[bold]ttlaunch attach[/bold]   the newest run, from its first line. Ctrl-C ends the run, Ctrl-\\ only leaves the view

[bold]ttlaunch attach 3fa1[/bold]   the run whose id ends with 3fa1

[bold]ttlaunch attach latest --only role=worker[/bold]   show only the output of the workers
"""


def attach(
    run: NamedRun = "latest",
    *,
    only: Only = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
) -> None:
    """Show a run until it ends, as `ttlaunch run` does, and exit with its status."""
    from ttlaunch.app.logs import chosen_ranks
    from ttlaunch.app.sinks import judge_sinks
    from ttlaunch.app.slurm_job import job_of_run
    from ttlaunch.cli.session import Attached, SubmittedRun
    from ttlaunch.cli.watching import report_end, watch
    from ttlaunch.running.runs.facts import read_ranks

    path = find_named_run(run, runs_dir=runs_dir)
    job = None if (path / contract.REPORT_FILE).is_file() else job_of_run(path)
    supervisor = SubmittedRun(job) if job else Attached(read_launcher_here(path, "attach"))
    try:
        chosen = chosen_ranks(only or (), read_ranks(path))
        watched = watch(supervisor, path, form=form, only=chosen)
    except (OSError, ValueError) as error:
        raise unreadable_run(path, error) from error
    exit_with(report_end(watched, form=form, judge=judge_sinks))
