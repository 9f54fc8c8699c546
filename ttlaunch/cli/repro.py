"""`ttlaunch repro`: start a run again on this machine, from what its folder says, and compare the bits."""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ttlaunch import contract
from ttlaunch.app.execute import RunOptions, execute_plan, make_ready, marks_of_command
from ttlaunch.app.named_run import find_named_run
from ttlaunch.cli.console import exit_with, print_lines
from ttlaunch.cli.options import Env, GraceSeconds, HangTimeout, NamedRun, OutputFormat, RunsDir, Verbose
from ttlaunch.diagnostics import Format, has_errors

EXAMPLES = """\
[bold]ttlaunch repro[/bold]   repeat the newest run: same code, configuration, text, seeds and number of ranks

[bold]ttlaunch repro 2026-08-23T10-14-07-3fa1[/bold]   a run by its id or the path of its folder; its ranks run on this machine

[bold]ttlaunch repro latest --with-changes[/bold]   repeat it with changed code, to see the effect of the change
"""


def repro(
    run: NamedRun = "latest",
    *,
    with_changes: Annotated[
        bool, typer.Option("--with-changes", help="Start even if code or text have changed.")
    ] = False,
    env: Env = None,
    grace: GraceSeconds = 30.0,
    hang_timeout: HangTimeout = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Repeat a run on this machine, and report whether it ends with the same bits."""
    from ttlaunch.app.restarts import exit_status_of
    from ttlaunch.cli.dialogue import TerminalDialogue
    from ttlaunch.cli.session import start_supervisor, wait_for_run
    from ttlaunch.cli.watching import report_end, status_without_run, watch
    from ttlaunch.lab.repro import compare_bits, older_package, prepare_again, read_origin_of

    marks = marks_of_command()
    runs = Path.cwd() / runs_dir
    dialogue = TerminalDialogue(form, verbose=verbose)
    origin = read_origin_of(find_named_run(run, runs_dir=runs_dir))
    if os.environ.pop(contract.ENV_KEPT_PACKAGE, None) is None and not with_changes:
        package = older_package(origin, dialogue)
        if package is not None:
            _repeat_with(package, origin.working_folder)
    prepared = prepare_again(origin, dialogue, runs_dir=runs, with_changes=with_changes, env=env or ())
    options = RunOptions(runs, grace, hang_timeout_s=hang_timeout, marks=marks)
    ready = make_ready(prepared, options, dialogue)
    session = start_supervisor(
        lambda begun: [execute_plan(prepared, options, dialogue, ready=ready, begun=begun)],
        exit_status=exit_status_of,
        form=form,
        verbose=verbose,
    )
    path = wait_for_run(session)
    if path is None:
        exit_with(status_without_run(session.exit_status(), form=form))
    watched = watch(session, path, form=form)
    status = report_end(watched, form=form, judge=lambda outcome: compare_bits(origin, outcome.report))
    if watched.was_cut_off:
        exit_with(status)
    report = watched.outcomes[-1].report
    verdict = compare_bits(origin, report)
    is_same = report.status == "done" and report.parameters_sha256 is not None and not verdict
    if is_same and form is not Format.JSON:
        print_lines([f"  same bits as     {origin.run_id}"])
    exit_with(status or (1 if has_errors(verdict) else 0))


def _repeat_with(package: Path, working_folder: Path) -> NoReturn:
    """Continue this command with another version of ttlaunch, for the launcher as for the ranks.

    Ranks take their modules from PYTHONPATH, which is the folder of the run if the user has not set it.
    """
    after = os.environ.get("PYTHONPATH", str(working_folder))
    environment = {**os.environ, "PYTHONPATH": f"{package}:{after}", contract.ENV_KEPT_PACKAGE: package.name}
    # -P: the current folder may have a `ttlaunch` of its own, such as a checkout.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "ttlaunch", *sys.argv[1:]], environment)  # noqa: S606 - the same program
