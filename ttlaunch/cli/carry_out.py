"""Carry a checked plan out in front of the user: get everything ready, start it, show it, say what came out."""

import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch.cli.console import print_json, refuse, show_diagnostics
from ttlaunch.diagnostics import Diagnostic, Format

if TYPE_CHECKING:
    from ttlaunch.cli.planning import Prepared
    from ttlaunch.cli.ready_here import Ready
    from ttlaunch.launch.crew import Crew
    from ttlaunch.launch.output import View
    from ttlaunch.launch.report import Report
    from ttlaunch.launch.run_folder import RunFolder
    from ttlaunch.plan.launch_plan import LaunchPlan

_ELSEWHERE = "`--runs-dir DIR` makes run folders somewhere else"


@dataclass(frozen=True)
class Outcome:
    """A run that has come to its end.

    Attributes:
        scratch: Its folder in shared memory on every host, which is gone by now.
    """

    report: "Report"
    plan: "LaunchPlan"
    folder: "RunFolder"
    scratch: Path


def carry_out(
    prepared: "Prepared",
    *,
    runs_dir: Path,
    form: Format,
    verbose: bool,
    grace_s: float = 30.0,
    typed: Sequence[str] = (),
    only: Collection[int] | None = None,
    hang_timeout_s: float | None = None,
    watched_by: "Callable[[View, Crew, RunFolder, Path], View] | None" = None,
) -> Outcome:
    """Start a plan and show it until it has ended; leaves if a host is not ready.

    Args:
        prepared: The checked plan.
        runs_dir: Where run folders are made.
        form: Of what is printed; with notes if `verbose`.
        grace_s: What ranks have to leave when the end is ordered.
        typed: The command line, if it can be typed again with `--resume`.
        only: Ranks whose output is shown; None: of all.
        hang_timeout_s: See `HangWatch`.
        watched_by: Puts something between the run and what shows it.
    """
    from ttlaunch.cli.live import make_view
    from ttlaunch.cli.registering import registered
    from ttlaunch.launch.ending import Grace
    from ttlaunch.launch.run_folder import scratch_folder
    from ttlaunch.launch.supervise import supervise
    from ttlaunch.launch.watch import Watch

    ready = _make_ready(prepared, form=form, verbose=verbose)
    plan, folder = ready.plan, _make_folder(ready, prepared, runs_dir=runs_dir, form=form)
    watch = Watch(plan, folder)
    with (
        scratch_folder() as scratch,
        ready.crew(folder, watch, scratch) as crew,
        registered(plan, folder, form=form),
        make_view(plan, folder, quiet=form is Format.JSON, only=only) as view,
    ):
        report = supervise(
            plan,
            folder,
            environment=os.environ,
            view=watched_by(view, crew, folder, scratch) if watched_by else view,
            watch=watch,
            crew=crew,
            scratch=scratch,
            grace=Grace(grace_s, tuple(typed)),
            hang_timeout_s=hang_timeout_s,
        )
    return Outcome(report, plan, folder, scratch)


def _make_folder(ready: "Ready", prepared: "Prepared", *, runs_dir: Path, form: Format) -> "RunFolder":
    """The run's folder with all that is decided; leaves if it cannot be made."""
    from ttlaunch.errors import RunFolderError
    from ttlaunch.launch.record_inputs import write_inputs
    from ttlaunch.launch.run_folder import create_run_folder

    try:
        folder = create_run_folder(runs_dir)
        resolved = prepared.resolved_config
        write_inputs(ready.plan, folder, resolved_config=resolved, shell=os.environ, release=ready.release)
    except RunFolderError as error:
        refuse([Diagnostic("H008", str(error), hints=(_ELSEWHERE,))], form=form)
    return folder


def tell(
    outcome: Outcome,
    *,
    form: Format,
    more: Sequence[Diagnostic] = (),
    restarts: Sequence[Outcome] = (),
    exit_status: int | None = None,
) -> None:
    """Say what came out.

    Args:
        outcome: Of the run; of several starts, the last.
        form: Of what is printed.
        more: What else is to be said of it.
        restarts: The starts before it, which JSON has too.
        exit_status: Of the command, if it is not that of the run.
    """
    from ttlaunch.cli.checkpoint_view import checkpoint_diagnostics
    from ttlaunch.cli.ending_view import outstayed_diagnostics
    from ttlaunch.cli.summary import failure_diagnostic, show_summary
    from ttlaunch.cli.traffic_view import traffic_diagnostics
    from ttlaunch.launch.trace import write_trace

    report, plan, folder = outcome.report, outcome.plan, outcome.folder
    timeline = write_trace(folder.path, plan.ranks)
    failure, lost = failure_diagnostic(report, folder), checkpoint_diagnostics(report)
    is_done = report.status == "done"  # else the first thing named is what broke
    differences = traffic_diagnostics(report.traffic, [row.role for row in plan.ranks]) if is_done else []
    found = [
        *([failure] if failure else []),
        *outstayed_diagnostics(report, folder),
        *lost,
        *differences,
        *more,
    ]
    if form is Format.JSON:
        earlier = [{"run_id": one.folder.run_id, "failure": one.report.as_json()["failure"]} for one in restarts]
        texts = [diagnostic.as_json() for diagnostic in found]
        status = report.exit_status if exit_status is None else exit_status
        print_json({**report.as_json(), "exit_status": status, "earlier": earlier, "diagnostics": texts})
    else:
        show_summary(report, plan, folder, timeline=timeline, stream=sys.stdout)
        show_diagnostics(found, form=form)


def _make_ready(prepared: "Prepared", *, form: Format, verbose: bool) -> "Ready":
    """Check everything where the ranks will run, and bring the code there; leaves if a host is not ready."""
    if prepared.is_here:
        from ttlaunch.cli.ready_here import ready_here

        return ready_here(prepared, form=form, verbose=verbose)
    from ttlaunch.cli.ready_hosts import ready_hosts

    return ready_hosts(prepared, form=form, verbose=verbose)
