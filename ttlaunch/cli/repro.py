"""`ttlaunch repro`: start a run again on this machine, from what its folder says, and compare the bits."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttlaunch.app.carry_out import RunOptions, carry_out, make_ready
from ttlaunch.app.named_run import find_named_run, refuse_run
from ttlaunch.app.resolve import RunSpec
from ttlaunch.cli.console import leave, refuse, show_diagnostics
from ttlaunch.cli.options import GraceSeconds, HangTimeout, OutputFormat, RunsDir, Verbose
from ttlaunch.diagnostics import Diagnostic, Format, Severity, has_errors

if TYPE_CHECKING:
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.running.report import Report
    from ttlaunch.running.runs.repeat import Origin

EXAMPLES = """\
[bold]ttlaunch repro[/bold]   the newest run once more: same code, configuration, text, seeds and number of ranks

[bold]ttlaunch repro 2026-08-23T10-14-07-3fa1[/bold]   a run by its id, or by the path of its folder; wherever its ranks ran, they run here

[bold]ttlaunch repro latest --with-changes[/bold]   although the recipe has changed since then, to see what that did
"""
_SHORT = 12


def repro(
    run: Annotated[
        str, typer.Argument(metavar="[RUN|latest]", help="A run's id, or the path of its folder.", show_default=False)
    ] = "latest",
    *,
    with_changes: Annotated[
        bool, typer.Option("--with-changes", help="Start although code or text are no longer the same.")
    ] = False,
    grace: GraceSeconds = 30.0,
    hang_timeout: HangTimeout = None,
    runs_dir: RunsDir = Path("runs"),
    form: OutputFormat = Format.FULL,
    verbose: Verbose = False,
) -> None:
    """Start a run again on this machine and say whether the same bits came out."""
    from ttlaunch.app.restarts import exit_status_of
    from ttlaunch.app.supervisor import start_supervisor, wait_for_run
    from ttlaunch.cli.run_end import status_without_run, tell_end
    from ttlaunch.cli.watching import watch

    runs = Path.cwd() / runs_dir
    origin = _read(find_named_run(run, runs_dir=runs_dir, form=form), form=form)
    prepared = _prepare_again(origin, runs_dir=runs, with_changes=with_changes, form=form, verbose=verbose)
    way = RunOptions(runs, form, verbose, grace, hang_timeout_s=hang_timeout)
    ready = make_ready(prepared, way)
    session = start_supervisor(
        lambda begun: [carry_out(prepared, way, ready=ready, begun=begun)], exit_status=exit_status_of
    )
    path = wait_for_run(session)
    if path is None:
        leave(status_without_run(session.exit_status(), form=form))
    watched = watch(session, path, form=form)
    status = tell_end(watched, form=form, judge=lambda outcome: _compare(origin, outcome.report))
    if watched.was_cut_off:
        leave(status)
    report = watched.outcomes[-1].report
    verdict = _compare(origin, report)
    is_same = report.status == "done" and report.parameters_sha256 is not None and not verdict
    if is_same and form is not Format.JSON:
        sys.stdout.write(f"  same bits as     {origin.run_id}\n")
    leave(status or (1 if has_errors(verdict) else 0))


def _prepare_again(
    origin: "Origin", *, runs_dir: Path, with_changes: bool, form: Format, verbose: bool
) -> "PreparedRun":
    """Check and plan the same once more, in the folder where it was started; leaves if it is not the same."""
    from ttlaunch.app.prepare_run import prepare

    found = _differences(origin, with_changes=with_changes)
    if has_errors(found):
        refuse(found, form=form, verbose=verbose)
    if origin.working_folder.is_dir():
        os.chdir(origin.working_folder)
    request = RunSpec(
        target=origin.target,
        config_file=str(origin.config_file) if origin.config_file else None,
        ranks=origin.world_size,
        arguments=origin.arguments,
        is_command=origin.is_command,
        resume=origin.resume,
        replay=origin.arrivals,
        runs_dir=runs_dir,
    )
    prepared = prepare(request, form=form, verbose=verbose)
    choice = prepared.description.choice
    found += _other_text(origin, (choice.data or {}).get("sha256") if choice else None, with_changes=with_changes)
    if has_errors(found):
        refuse(found, form=form, verbose=verbose)
    show_diagnostics(found, form=form, verbose=verbose)
    return prepared


def _read(path: Path, *, form: Format) -> "Origin":
    from ttlaunch.running.runs.repeat import read_origin

    try:
        return read_origin(path.resolve())
    except (OSError, ValueError) as error:
        refuse_run(path, error, form=form)


def _differences(origin: "Origin", *, with_changes: bool) -> list[Diagnostic]:
    """What is not as it was: an error where another program would run, a warning where other libraries would."""
    from ttlaunch.running.runs.repeat import changed_code, changed_versions

    code, versions = changed_code(origin), changed_versions(origin)
    found = [_changed(origin, code, with_changes=with_changes)] if code else []
    if versions:
        message = f"{origin.run_id} may end with other bits now: {versions[0]}"
        found.append(Diagnostic("P034", message, notes=tuple(versions[1:]), severity=Severity.WARNING))
    return found


def _other_text(origin: "Origin", sha256: str | None, *, with_changes: bool) -> list[Diagnostic]:
    before = (origin.data or {}).get("sha256")
    if before == sha256:
        return []
    path = (origin.data or {}).get("path") or "the built-in text"
    change = f"the text {path} has changed: its SHA-256 was {str(before)[:_SHORT]}…, now it is {str(sha256)[:_SHORT]}…"
    return [_changed(origin, change, with_changes=with_changes)]


def _changed(origin: "Origin", change: str, *, with_changes: bool) -> Diagnostic:
    commit = (f"it ran at commit {origin.commit}",) if origin.commit else ()
    if with_changes:
        message = f"this is not {origin.run_id} again: {change}"
        return Diagnostic("P033", message, notes=commit, severity=Severity.WARNING)
    hints = ("`--with-changes` starts it as it is now",)
    return Diagnostic("P033", f"{origin.run_id} cannot be repeated: {change}", notes=commit, hints=hints)


def _compare(origin: "Origin", report: "Report") -> list[Diagnostic]:
    """Whether the same bits came out, as far as both runs came to their end."""
    if report.status != "done" or report.parameters_sha256 is None:
        return []
    if origin.sha256 is None:
        message = f"{origin.run_id} did not come to its end, so there is nothing to compare with"
        return [Diagnostic("R053", message, severity=Severity.WARNING)]
    if origin.sha256 == report.parameters_sha256:
        return []
    message = f"other bits than {origin.run_id}: its parameters had sha256 {origin.sha256[:_SHORT]}…"
    return [Diagnostic("R053", message)]
