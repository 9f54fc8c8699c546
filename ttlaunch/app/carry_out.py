"""Carry a checked plan out: get everything ready, start it, and watch over it to its end.

This is what a supervisor does, in a process of its own (`cli/session.py`). It shows nothing; whoever wants to see the run
reads its folder.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.app.outcome import Outcome
from ttlaunch.cli.console import refuse
from ttlaunch.diagnostics import Diagnostic, Format

if TYPE_CHECKING:
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.app.ready_here import LaunchContext
    from ttlaunch.planning.launch_plan import LaunchPlan
    from ttlaunch.records.ranks import AnyProgress
    from ttlaunch.running.crew import Crew
    from ttlaunch.running.logs.output import View
    from ttlaunch.running.runs.run_folder import RunFolder
    from ttlaunch.running.watch import RankState

WatchedBy = Callable[["View", "Crew", "RunFolder", Path], "View"]
_ELSEWHERE = "`--runs-dir DIR` makes run folders somewhere else"


@dataclass(frozen=True)
class RunOptions:
    """How plans are carried out.

    Attributes:
        runs_dir: Where run folders are made.
        form: Of what is printed; with notes if `verbose`.
        grace_s: What ranks have to leave when the end is ordered.
        typed: The command line, if it can be typed again with `--resume`.
        hang_timeout_s: How long no rank may move; None: it follows from the steps.
        only: Ranks whose output is shown, where it is shown; None: of all.
        lease_s: How long ranks on another host run on when nothing is heard from here.
    """

    runs_dir: Path
    form: Format
    verbose: bool = False
    grace_s: float = 30.0
    typed: Sequence[str] = ()
    hang_timeout_s: float | None = None
    only: Collection[int] | None = None
    lease_s: float = contract.LEASE_S


def make_ready(prepared: "PreparedRun", way: RunOptions) -> "LaunchContext":
    """Check everything where the ranks will run, and bring the code there; leaves if a host is not ready."""
    if prepared.is_here:
        from ttlaunch.app.ready_here import ready_here

        return ready_here(prepared, form=way.form, verbose=way.verbose)
    from ttlaunch.app.ready_hosts import ready_hosts

    return ready_hosts(prepared, form=way.form, verbose=way.verbose, lease_s=way.lease_s)


def carry_out(
    prepared: "PreparedRun",
    way: RunOptions,
    *,
    ready: "LaunchContext | None" = None,
    begun: "Callable[[RunFolder], None]" = lambda _: None,
    watched_by: WatchedBy | None = None,
) -> Outcome:
    """Start a plan and watch over it until it has ended; leaves if a host is not ready.

    Args:
        prepared: The checked plan.
        way: How it is carried out.
        ready: Its hosts, if they are ready already.
        begun: Told of the run's folder once all is there and nothing has started.
        watched_by: Puts something between the run and the view, which shows the run then; None: nobody shows it here.
    """
    from ttlaunch.app.registering import registered
    from ttlaunch.running.ending import Grace
    from ttlaunch.running.guard import guarded
    from ttlaunch.running.runs.recorded import facts_of
    from ttlaunch.running.runs.run_folder import scratch_folder
    from ttlaunch.running.supervise import supervise
    from ttlaunch.running.watch import Watch

    ready = ready or make_ready(prepared, way)
    plan, folder = ready.plan, _make_folder(ready, prepared, way)
    watch = Watch(plan, folder)
    with (
        scratch_folder() as scratch,
        guarded(folder.run_id, scratch),
        ready.crew(folder, watch, scratch) as crew,
        registered(plan, folder, form=way.form),
        _view(plan, folder, crew, scratch, way, watched_by) as view,
    ):
        begun(folder)
        report = supervise(
            plan,
            folder,
            environment=os.environ,
            view=view,
            watch=watch,
            crew=crew,
            scratch=scratch,
            grace=Grace(way.grace_s, tuple(way.typed)),
            hang_timeout_s=way.hang_timeout_s,
        )
    return Outcome(report, facts_of(plan), folder, scratch)


@contextmanager
def _view(
    plan: "LaunchPlan", folder: "RunFolder", crew: "Crew", scratch: Path, way: RunOptions, watched_by: WatchedBy | None
) -> "Iterator[View]":
    if watched_by is None:
        yield Spokesman()
        return
    from ttlaunch.cli.live import make_following_view
    from ttlaunch.running.runs.recorded import facts_of

    with make_following_view(facts_of(plan), folder, quiet=way.form is Format.JSON, only=way.only) as view:
        yield watched_by(view, crew, folder, scratch)


class Spokesman:
    """Says what a supervisor has to say, and leaves it to others to show the run."""

    def output(self, stream: str, line: bytes) -> None:
        (sys.stdout if stream == "stdout" else sys.stderr).write(line.decode("utf-8", "replace") + "\n")

    def record(self, state: "RankState", record: "AnyProgress") -> None:
        """It stands in the run's folder."""

    def tick(self, ranks: "list[RankState]") -> None:
        """Likewise."""


def _make_folder(ready: "LaunchContext", prepared: "PreparedRun", way: RunOptions) -> "RunFolder":
    """The run's folder with all that is decided; leaves if it cannot be made."""
    from ttlaunch.errors import RunFolderError
    from ttlaunch.running.runs.record_inputs import write_inputs
    from ttlaunch.running.runs.run_folder import create_run_folder

    try:
        folder = create_run_folder(way.runs_dir)
        resolved = prepared.resolved_config
        write_inputs(ready.plan, folder, resolved_config=resolved, shell=os.environ, release=ready.release)
    except RunFolderError as error:
        refuse([Diagnostic("H008", str(error), hints=(_ELSEWHERE,))], form=way.form)
    return folder
