"""Execute a checked plan: make everything ready, start the run, and supervise it until it ends.

A supervisor does this in a process of its own (`app/supervisor_process.py`). It shows nothing; views read the run's folder.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ttlaunch import contract
from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.outcome import Outcome
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError, shown, usage_error
from ttlaunch.quick_dataclass import dataclass

if TYPE_CHECKING:
    from ttlaunch.app.coordinator_network import OpenNetwork
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.app.ready_here import LaunchContext
    from ttlaunch.planning.launch_plan import LaunchPlan
    from ttlaunch.records.ranks import AnyProgress
    from ttlaunch.running.ending import Grace
    from ttlaunch.running.logs.output import View
    from ttlaunch.running.membership.outside import OutsideWorkers
    from ttlaunch.running.rank_controller import RankController
    from ttlaunch.running.report import Report
    from ttlaunch.running.runs.run_folder import RunFolder
    from ttlaunch.running.watch import RankState, Watch


@dataclass(frozen=True)
class StartingRun:
    """A run whose folder has been made and whose ranks have not been started.

    Attributes:
        controller: Signals and ends the run's ranks.
        scratch: The run's folder in shared memory, with the same path on every host.
    """

    plan: "LaunchPlan"
    controller: "RankController"
    folder: "RunFolder"
    scratch: Path


WatchedBy = Callable[[StartingRun], "AbstractContextManager[View]"]
"""A function that returns the view to which every record and line of output of a run is passed."""

_ELSEWHERE = "`--runs-dir DIR` makes run folders somewhere else"


@dataclass(frozen=True)
class RunOptions:
    """How plans are executed.

    Attributes:
        runs_dir: The folder in which run folders are made.
        grace_s: The time that ranks have to exit after an order to end.
        typed: The command line, if it can be typed again with `--resume`; else empty.
        hang_timeout_s: After how long without progress a run counts as hung; None to derive it from the steps.
        lease_s: How long ranks on another host continue to run without a message from this machine.
        share_with: The id of a group whose members may read the run; None: only the user can.
        restarts: How often the run has been restarted.
        most_restarts: How often it may be restarted.
        coordinator: Where an elastic run takes workers of other machines, `HOST:PORT`; None: nowhere.
        answers_at: The path of the socket on which the head of a serving run takes asks; None for any other run.
        marks: Parts of the preparation with the times when they began, see `running/start_times.py`; empty if nobody measures it.
    """

    runs_dir: Path
    grace_s: float = 30.0
    typed: Sequence[str] = ()
    hang_timeout_s: float | None = None
    lease_s: float = contract.LEASE_S
    share_with: int | None = None
    restarts: int = 0
    most_restarts: int = 0
    marks: Sequence[tuple[str, float]] = ()
    coordinator: str | None = None
    answers_at: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Return what shims read from their environment: it may differ between runs of one plan."""
        more = {} if self.answers_at is None else {contract.ENV_ANSWERS_AT: self.answers_at}
        restarts = {contract.ENV_RESTARTS: str(self.restarts), contract.ENV_MOST_RESTARTS: str(self.most_restarts)}
        return restarts | more

    @property
    def grace(self) -> "Grace":
        from ttlaunch.running.ending import Grace

        return Grace(self.grace_s, tuple(self.typed))


def group_id(name: str) -> int:
    """Find the group whose members may read a run.

    Raises:
        LaunchError: There is no such group, or this user is no member of it.
    """
    import grp

    try:
        group = grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise usage_error(f"there is no group `{shown(name)}` on this machine to share the run with") from error
    if os.geteuid() != 0 and group not in {os.getegid(), *os.getgroups()}:
        message = f"only members of `{shown(name)}` can share a run with it, and this user is none"
        raise usage_error(message, "`id -nG` names the groups of this user")
    return group


def marks_of_command() -> tuple[tuple[str, float], ...]:
    """Return when this command was started, and that it begins its checks now, for `RunOptions.marks`."""
    from ttlaunch.running.runs.launcher import began_at

    return (("command", began_at(os.getpid())), ("checks", time.time()))


def make_ready(prepared: "PreparedRun", options: RunOptions, dialogue: Dialogue) -> "LaunchContext":
    """Check the machines on which the ranks will run, and send the code to them.

    Raises:
        LaunchError: A host is not ready.
    """
    if prepared.is_here:
        from ttlaunch.app.ready_here import ready_here

        return ready_here(prepared, dialogue)
    from ttlaunch.app.ready_hosts import ready_hosts

    return ready_hosts(prepared, dialogue, lease_s=options.lease_s, takes_others=options.coordinator is not None)


def execute_plan(
    prepared: "PreparedRun",
    options: RunOptions,
    dialogue: Dialogue,
    *,
    ready: "LaunchContext | None" = None,
    begun: "Callable[[RunFolder], None]" = lambda _: None,
    watched_by: WatchedBy | None = None,
) -> Outcome:
    """Start a plan and supervise the run until it has ended.

    Args:
        begun: Called with the run's folder when everything in it is written and nothing has been started.
        watched_by: Returns the view of the run; None for one that writes the supervisor's messages to the run's folder.

    Raises:
        LaunchError: A host is not ready, or the run's folder cannot be made; nothing was started.
    """
    from ttlaunch.running.guard import guarded
    from ttlaunch.running.runs.run_folder import private_files, scratch_folder
    from ttlaunch.running.watch import Watch

    ready = ready or make_ready(prepared, options, dialogue)
    plan, folder = ready.plan, _make_folder(ready, prepared, options, dialogue=dialogue)
    with (
        private_files(folder),
        scratch_folder() as scratch,
        guarded(folder.run_id, scratch, daemons=plan.engine.names.daemons),  # ends ranks if this process is killed
        _network(options) as network,
        ready.controller(
            folder, watch := Watch(plan, folder), scratch, variables=options.variables, network=network
        ) as controller,
        _registered(plan, folder, dialogue) as wait_for_registry,
        (watched_by or _in_its_folder)(run := StartingRun(plan, controller, folder, scratch)) as view,
    ):
        noting = _noting_marks(begun, options, ready, wait_for_registry=wait_for_registry)
        report = _supervise(prepared, options, run, ready=ready, view=view, watch=watch, begun=noting, network=network)
    from ttlaunch.running.runs.facts import facts_of

    return Outcome(report, facts_of(plan), folder, scratch)


def _supervise(
    prepared: "PreparedRun",
    options: RunOptions,
    run: StartingRun,
    *,
    ready: "LaunchContext",
    view: "View",
    watch: "Watch",
    begun: "Callable[[RunFolder], None]",
    network: "OpenNetwork | None",
) -> "Report":
    from ttlaunch.running.supervise import supervise  # while the interpreter that will start the ranks starts

    return supervise(
        run.plan,
        run.folder,
        engine=prepared.engine,
        environment=os.environ,
        view=view,
        watch=watch,
        controller=run.controller,
        scratch=run.scratch,
        grace=options.grace,
        hang_timeout_s=options.hang_timeout_s,
        begun=begun,
        serve=_service(prepared, run, ready, network=network),
        takes_others=network is not None,
    )


def _network(options: RunOptions) -> "AbstractContextManager[OpenNetwork | None]":
    if options.coordinator is None:
        return nullcontext()
    from ttlaunch.app.coordinator_network import open_network

    return open_network(options.coordinator)


def _service(
    prepared: "PreparedRun", run: StartingRun, ready: "LaunchContext", *, network: "OpenNetwork | None"
) -> "Callable[[OutsideWorkers], AbstractContextManager[None]]":
    if run.plan.elastic is None:
        return lambda _: nullcontext()
    from ttlaunch.app.coordinator_service import service_of

    return service_of(prepared, ready, run.folder, scratch=run.scratch, network=network)


def _registered(
    plan: "LaunchPlan", folder: "RunFolder", dialogue: Dialogue
) -> "AbstractContextManager[Callable[[], None]]":
    from ttlaunch.app.registering import registered

    return registered(plan, folder, dialogue)


def _noting_marks(
    begun: "Callable[[RunFolder], None]",
    options: RunOptions,
    ready: "LaunchContext",
    *,
    wait_for_registry: "Callable[[], None]",
) -> "Callable[[RunFolder], None]":
    """Have the run's history say when each part of the preparation began, once everything is prepared."""

    def begun_and_noted(folder: "RunFolder") -> None:
        from ttlaunch.running.runs.run_folder import append_event

        wait_for_registry()  # its warnings go to the terminal, which `begun` leaves
        begun(folder)
        if options.marks:
            marks = {**dict(options.marks), **ready.marks, "engine": time.time()}
            append_event(folder, contract.EVENT_PREPARED, marks=marks)

    return begun_and_noted


def _in_its_folder(run: StartingRun) -> "AbstractContextManager[View]":
    return nullcontext(FolderView(run.folder))


class FolderView:
    """Writes a supervisor's messages into the run's folder; other processes show the run."""

    def __init__(self, folder: "RunFolder") -> None:
        from ttlaunch.running.runs.run_folder import supervisor_file

        self._files = {stream: folder.file(supervisor_file(stream)) for stream in ("stdout", "stderr")}

    def output(self, stream: str, line: bytes) -> None:
        """Append a line. A write error is ignored: the supervisor notices a full disk elsewhere, and reports it."""
        try:
            with self._files[stream].open("ab", buffering=0) as file:
                file.write(line + b"\n")
        except OSError:
            return

    def record(self, state: "RankState", record: "AnyProgress") -> None:
        """Do nothing: records are in the run's folder already."""

    def tick(self, ranks: "list[RankState]") -> None:
        """Do nothing: views in other processes draw the states."""


def _make_folder(
    ready: "LaunchContext", prepared: "PreparedRun", options: RunOptions, *, dialogue: Dialogue
) -> "RunFolder":
    """Make the run's folder and write the plan and all inputs into it."""
    from ttlaunch.errors import RunFolderError
    from ttlaunch.running.runs.record_inputs import write_inputs
    from ttlaunch.running.runs.run_folder import create_run_folder, private_files
    from ttlaunch.spec.topology.variables import variables_named

    try:
        folder = create_run_folder(options.runs_dir, group=options.share_with)
        resolved = prepared.resolved_config
        with private_files(folder):
            found = write_inputs(
                ready.plan,
                folder,
                resolved_config=resolved,
                shell=os.environ,
                release=ready.release,
                given=variables_named(prepared.request.env),
            )
            _keep_picture(prepared, folder)
        dialogue.warn(found)
    except RunFolderError as error:
        raise LaunchError([Diagnostic("H008", str(error), hints=(_ELSEWHERE,), blame=Blame.HOSTS)]) from error
    return folder


def _keep_picture(prepared: "PreparedRun", folder: "RunFolder") -> None:
    """Write what `ttlaunch show` would draw of the cluster with this run's ranks; a single host needs no picture, and views do without one."""
    topology = prepared.topology
    if len(topology.hosts) + len(topology.meshes) <= 1:
        return
    from dataclasses import asdict

    from ttlaunch.draw.scene import make_scene
    from ttlaunch.running.runs.facts import CLUSTER_FILE

    scene = make_scene(topology, prepared.description.layout, recipe=prepared.description.name)
    with contextlib.suppress(OSError):
        folder.file(CLUSTER_FILE).write_text(json.dumps(asdict(scene)) + "\n", encoding="utf-8")
