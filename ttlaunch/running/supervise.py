"""Supervise a run from start to end: show its output, notice the first failure, and end what does not end by itself.

One loop reads the engine's output, polls the ranks' records, and after a failure, a Ctrl-C or a SIGTERM does what
`ending.py` decides. At the end, the rank controller kills every remaining process with the run's id.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttlaunch import contract
from ttlaunch.agent.stop_marker import leave_stop_marker
from ttlaunch.engines.base import Capability, Engine, EngineProcess
from ttlaunch.engines.process import end_process
from ttlaunch.planning.launch_plan import LaunchPlan, RecipeProgram
from ttlaunch.records.members import MemberReport
from ttlaunch.records.ranks import AnyProgress
from ttlaunch.running.bad_records import report_bad_records
from ttlaunch.running.checkpoints.complete import CheckpointKeeper, LostCheckpoints, mark_later_checkpoints, newest_step
from ttlaunch.running.conclude import Ending, compared_replicas, conclude
from ttlaunch.running.ending import (
    AFTER_TERM_S,
    STOP,
    USUAL_GRACE,
    Act,
    Grace,
    NoteFailure,
    RunEnd,
    ShowMessage,
    SignalEngine,
    SignalRanks,
    keeps_checkpoints,
    stopped,
)
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.failures.stderr_tail import stderr_tails
from ttlaunch.running.flight_recorders import drop_evidence, keep_recorders
from ttlaunch.running.hang.hangs import HangWatch
from ttlaunch.running.hang.stopped import StoppedWatch
from ttlaunch.running.hang.stuck_exit import StuckExitWatch
from ttlaunch.running.logs.merge import MergedWriter
from ttlaunch.running.logs.output import EngineOutput, View
from ttlaunch.running.lost_folders import FolderWatch
from ttlaunch.running.lost_hosts import SilenceWatch
from ttlaunch.running.metrics.event_log import write_event_log
from ttlaunch.running.metrics.trace import write_trace
from ttlaunch.running.pace import Pace
from ttlaunch.running.rank_controller import RankController, engine_variables
from ttlaunch.running.report import Report, write_report
from ttlaunch.running.runs.launcher import TIME_LIMIT_SIGNAL
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.single_trainings import SingleTrainingWatch
from ttlaunch.running.watch import Phase, RankState, Watch

if TYPE_CHECKING:  # other runs start sooner without it
    from ttlaunch.running.membership.elastic_run import ElasticRun
    from ttlaunch.running.membership.outside import OutsideWorkers

_STANDSTILL_S = 5.0
_NOT_LOOKED_S = 1.0
"""Workers of an elastic run are blamed for so long of the time in which nobody looked: so a loop that is always slow still finds who hangs."""
_CHANGE_S = 0.01  # between two looks while the members of an elastic run wait for orders


def supervise(
    plan: LaunchPlan,
    folder: RunFolder,
    *,
    engine: Engine,
    environment: Mapping[str, str],
    view: View,
    watch: Watch,
    controller: RankController,
    scratch: Path,
    grace: Grace = USUAL_GRACE,
    hang_timeout_s: float | None = None,
    begun: Callable[[RunFolder], None] = lambda _: None,
    serve: "Callable[[OutsideWorkers], AbstractContextManager[None]]" = lambda _: nullcontext(),
    takes_others: bool = False,
) -> Report:
    """Run a plan until it ends in any way, write `report.json`, and return the report.

    Args:
        plan: The plan; its files are already in `folder`.
        folder: The run folder.
        engine: The engine that starts the ranks; the plan was made with it.
        environment: The variables that the engine inherits.
        view: Shows output, records and states of the ranks as they come.
        watch: Follows the records of the ranks; it has read none yet.
        controller: Gives access to the processes of the ranks on their machines.
        scratch: A private folder with a short path for sockets and shared memory; every host has one with the same path.
        grace: The time that ranks have to exit after an order to end.
        hang_timeout_s: After how long without progress of any rank the run counts as hung; None: see `HangWatch`.
        begun: Called with the folder before anything starts; from then on, a run that is ordered to end writes a report.
        serve: Serves the workers of an elastic run while the run goes on.
        takes_others: Whether workers of other machines may join an elastic run.
    """
    run = _Supervision(
        plan=plan,
        folder=folder,
        engine=engine,
        view=view,
        watch=watch,
        controller=controller,
        grace=grace,
        hang_timeout_s=hang_timeout_s,
    )
    # Signals are caught until the report is written, so that there is a report however often Ctrl-C is pressed.
    with _signals(run.end), run.served(serve, takes_others=takes_others):
        begun(folder)
        return run.carry_out(engine_variables(plan, folder.run_id, environment, controller=controller, scratch=scratch))


@dataclass(kw_only=True)
class _Supervision:
    """The objects that watch one run, and the loop that calls each in turn."""

    plan: LaunchPlan
    folder: RunFolder
    engine: Engine
    view: View
    watch: Watch
    controller: RankController
    grace: Grace
    hang_timeout_s: InitVar[float | None]

    def __post_init__(self, hang_timeout_s: float | None) -> None:
        self._ending = Ending()
        self._takes_connections = True
        self._lost = LostCheckpoints(self.view)
        self._hangs = HangWatch(self.plan, self.folder, self.controller, timeout_s=hang_timeout_s)
        self._exits = StuckExitWatch(self.plan, self.folder, self.watch)
        self._silence = SilenceWatch(self.folder, self.view, goes_on=self.plan.elastic is not None)
        self._folders = FolderWatch(self.folder, self.view)
        self._standing = StoppedWatch(self.folder, self.view, self.controller)
        self._single = SingleTrainingWatch(self.plan, self.folder, self.view)
        self._elastic = self._open_elastic() if self.plan.elastic else None
        self._held: list[Act] = []  # orders that wait until workers from other machines have left
        loses_ranks = Capability.LOSE_RANK in self.engine.can
        self.end = RunEnd(
            self._ending,
            self.plan,
            grace_s=self.grace.seconds,
            loses_ranks=loses_ranks,
            stderr_tail=stderr_tails(self.folder),
        )

    def _open_elastic(self) -> "ElasticRun":
        from ttlaunch.running.membership.elastic_run import ElasticRun  # noqa: PLC0415  as above

        path = self.folder.path
        return ElasticRun(
            self.plan, self.folder, self.view, controller=self.controller, newest_checkpoint=lambda: newest_step(path)
        )

    def served(
        self, serve: "Callable[[OutsideWorkers], AbstractContextManager[None]]", *, takes_others: bool
    ) -> AbstractContextManager[None]:
        """Return the context in which the workers of an elastic run are served; for any other run, it does nothing."""
        if self._elastic is None:
            return nullcontext()
        self._elastic.waits_for_others = takes_others
        return serve(self._elastic.outside)

    def carry_out(self, environment: Mapping[str, str]) -> Report:
        """Start the engine, supervise the run, end what is left, and write the report."""
        started, leftovers, ending = time.monotonic(), 0, self._ending
        plan, folder = self.plan, self.folder
        with self._keeper() as checkpoints, MergedWriter(folder.path, self.watch) as merged:
            process = self.controller.start(
                self.engine, plan.engine, folder=folder.path, environment=environment, rows=plan.ranks
            )
            try:
                self._note_start(process)
                self._loop(process, checkpoints, merged)
            except OSError as error:
                ending.note_unusable_folder(error)
            finally:
                # The order matters. First note the time, so that ranks killed below are not taken for the first failure.
                # Then end the engine, so that shims can record how their ranks ended; then kill what is left. Only when no
                # process can write any more, read logs and checkpoints for the last time.
                ending.killing_since = time.time()
                end_process(process, patience_s=AFTER_TERM_S)
                leftovers = self._collect()
                self._finish(checkpoints, merged)
        report = conclude(
            plan,
            folder,
            watch=self.watch,
            ending=ending,
            engine=self.engine,
            returncode=process.wait(),  # it has ended
            duration_s=time.monotonic() - started,
            leftovers=leftovers,
        )
        lost, end = self._lost_checkpoints(report), stopped(ending, folder, self.grace)
        ranks = (*report.ranks, *(self._elastic.outside.summaries() if self._elastic else ()))
        report = replace(report, lost_checkpoints=lost, stopped=end, epochs=self._epochs(report), ranks=ranks)
        self.view.tick(self.watch.ranks)
        write_trace(folder.path, plan.ranks, complain=self.watch.bad.add)
        self._report_bad_records()
        _write_down(report, folder)
        return report

    def _lost_checkpoints(self, report: Report) -> Mapping[int, str]:
        """Return why steps have no checkpoint; the worker that writes the last one may end before others know that it has not."""
        has_last = self._elastic is not None and report.status == "done" and keeps_checkpoints(self.plan)
        if has_last and newest_step(self.folder.path) != report.steps:
            missing = {report.steps: "the worker that wrote it ended before it was complete"}
            self._lost.notice(self.watch.ranks, missing)
        return self._lost.clean_up(self.folder.path)

    def _epochs(self, report: Report) -> tuple[Mapping[str, Any], ...]:
        """Return the epochs of an elastic run, each with what its members sent."""
        if self._elastic is None:
            return ()
        from ttlaunch.running.metrics.epoch_traffic import compare_epochs  # noqa: PLC0415 - few runs are elastic

        epochs = [change.as_json() for change in self._elastic.membership.changes]
        is_done = report.status == "done"
        found = compare_epochs(
            self.folder.path, self.plan.as_json(), epochs, is_done=is_done, complain=self.watch.bad.add
        )
        sent = [None if one is None else one.as_json() for one in found]
        return tuple({**epoch, "traffic": one} for epoch, one in zip(epochs, sent, strict=True))

    def _note_start(self, process: EngineProcess) -> None:
        known = {"engine": self.plan.engine.name, "plan": self.plan.hash}
        pid = {} if process.pid is None else {contract.ENGINE_PROCESS: process.pid}
        append_event(self.folder, "start", **known, **pid)

    def _loop(self, process: EngineProcess, checkpoints: CheckpointKeeper, merged: MergedWriter) -> None:
        last_time, pace = _now(), Pace()
        with EngineOutput(process, self.folder.file(contract.LOGS_DIR), self.view) as output:
            while process.poll() is None:
                if self._elastic is not None:
                    self._elastic.note_engine()
                self.folder.path.stat()  # raises if the folder was removed; writing to open files would not
                output.read(_CHANGE_S if self._elastic and self._elastic.is_changing else pace.wait_s)
                last_time = self._notice_standstill(last_time)  # after the wait, in which it is most likely to happen
                merged.poll()
                self._pass_on(checkpoints, self.watch.look())
                self._refuse_connections(process)
                checkpoints.check()
                self.view.tick(self.watch.ranks)
                self._single.notice(self.watch.ranks)
                self._notice_losses()
                self._notice_members()
                self._notice_difference()
                self._notice_hang()
                self._close_to_more()
                if self._ending.is_failing and self._ending.terminated is None:
                    self.watch.read_exceptions()  # a rank that is still ending may have been the first to fail
                acts, self._held = [*self._held, *self.end.decide(time.monotonic(), self.watch.ranks)], []
                for act in acts:
                    self._do(act, process)
            output.drain()
        self._pass_on(checkpoints)
        if self._elastic is not None:
            self._elastic.judge_end()
            self._ending.tolerate(self._elastic.tolerated, self.watch.ranks)
            self._ending.lost_before_engine = self._elastic.lost_before_engine
            self._ending.too_late = self._elastic.too_late

    def _keeper(self) -> CheckpointKeeper:
        watch = self.watch
        return CheckpointKeeper(
            self.plan,
            self.folder,
            ranks=watch.ranks,
            replicas=watch.replicas,
            audits=watch.audits,
            complain=watch.bad.add,
        )

    def _refuse_connections(self, process: EngineProcess) -> None:
        """Close the engine to others once all ranks of a recipe have found each other.

        Engines ask nobody for a key, so another user of this machine could have one start programs with this user's rights.
        """
        is_recipe = isinstance(self.plan.program, RecipeProgram)  # other programs do not report when they are ready
        if is_recipe and self._takes_connections and all(state.ready_time for state in self.watch.ranks):
            self._takes_connections = False
            self.engine.refuse_connections(process)

    def _notice_standstill(self, last_time: float) -> float:
        """Return the present time, after noting it if this loop has not run for long since `last_time`."""
        now = _now()
        if now - last_time > _STANDSTILL_S:
            append_event(self.folder, "stood_still", seconds=round(now - last_time, 1))
            self._ending.stood_still_s = max(self._ending.stood_still_s, now - last_time)
        if self._elastic is not None and now - last_time > _NOT_LOOKED_S:
            self._elastic.excuse(now - last_time - _NOT_LOOKED_S)
        return now

    def _collect(self) -> int:
        """End what is left, keep the ranks' flight recorders, and return how many processes were left."""
        leftovers = self.controller.end(self._notice_last_losses)
        keep_recorders(self.controller.recordings, self.folder.path, world_size=self.plan.world_size)
        return leftovers

    def _finish(self, checkpoints: CheckpointKeeper, merged: MergedWriter) -> None:
        try:
            merged.finish()
            self._pass_on(checkpoints)  # a checkpoint counts if ranks on other hosts have come as far
            self.watch.replicas.settle({})  # no rank reports any more digests
            checkpoints.finish()
            mark_later_checkpoints(self.folder, self.watch.audits)
            if self._elastic is not None and self._elastic.has_saved and keeps_checkpoints(self.plan):
                from ttlaunch.running.checkpoints.last_states import (  # noqa: PLC0415 - few runs have any
                    take_in_last_state,
                )

                take_in_last_state(self.folder.path)
        except OSError as error:
            self._ending.note_unusable_folder(error)
        self._notice_last_losses()
        self._pass_on(checkpoints)

    def _pass_on(
        self, checkpoints: CheckpointKeeper, records: Iterator[tuple[RankState, AnyProgress]] | None = None
    ) -> None:
        """Pass on new records: all that are there, or those that are given."""
        reports: list[tuple[RankState, MemberReport]] = []
        for state, record in self.watch.records() if records is None else records:
            self.view.record(state, record)
            if isinstance(record, MemberReport):
                reports.append((state, record))
        if self._elastic is not None:
            self._elastic.take(reports)
        self._report_bad_records()
        self._lost.notice(self.watch.ranks, checkpoints.lost)

    def _report_bad_records(self) -> None:
        report_bad_records(self.watch.bad, self.plan.ranks, folder=self.folder, output=self.view.output)

    def _close_to_more(self) -> None:
        """Take no further ranks once all that were started have ended or are lost: then the run is over."""
        present = [state for state in self.watch.ranks if state.phase is not Phase.ABSENT]
        # A rank whose shim was killed leaves no record of its end.
        is_over = all(state.exit or self._ending.why_lost(state) for state in present)
        if len(present) < len(self.watch.ranks) and is_over:
            self.controller.add_no_more()

    def _notice_hang(self) -> None:
        if self._ending.since is None and self._ending.failure is None:
            self._standing.notice(self.watch.ranks)
            self._ending.failure = self._exits.check() or self._hang()

    def _hang(self) -> Failure | None:
        """Return the failure to report if the run hangs; an elastic one goes on without the rank that is to blame."""
        elastic, ranks = self._elastic, self.watch.ranks
        if elastic is not None and elastic.waits_for_workers(ranks):
            return None  # it says so, and for whom
        hang = self._hangs.check(ranks)
        if hang is None or (elastic is not None and elastic.outlives(hang, ranks, why_lost=self._ending.why_lost)):
            return None
        return hang

    def _notice_difference(self) -> None:
        """End a run whose replicas differ; no checkpoint of this step or a later one is completed."""
        if self._ending.failure is None:
            self._ending.failure = compared_replicas(self.plan, self.watch.replicas)

    def _notice_losses(self) -> None:
        losses = self.controller.losses(self.watch.ranks)
        self._ending.note_losses(losses)
        self._silence.notice(losses)
        self._folders.notice(losses.folders)

    def _notice_members(self) -> None:
        """Let the other workers of an elastic run go on without those that have ended."""
        if self._elastic is None:
            return
        ending, ranks = self._ending, self.watch.ranks
        is_ending = ending.since is not None
        self._elastic.notice(ranks, why_lost=ending.why_lost, is_ending=is_ending, away=ending.away.keys())
        if is_ending and not ending.is_failing:
            self._elastic.end_waiting(ranks)
        ending.tolerate(self._elastic.tolerated, ranks)
        self._elastic.notice_hosts(ending.away, ranks, is_ending=is_ending)
        ending.failure = ending.failure or self._elastic.failure
        if self.plan.elastic is not None and self.plan.elastic.has_local_steps:
            # Others make an average anew that only a lost worker had completed, and without that worker it is another one.
            self.watch.replicas.forget(self._elastic.tolerated)

    def _notice_last_losses(self) -> None:
        """Notice losses after the end of the run; a folder that cannot be written then becomes the reported failure."""
        try:
            self._notice_losses()
        except OSError as error:
            self._ending.note_unusable_folder(error)

    def _do(self, act: Act, process: EngineProcess) -> None:
        """Do what `ending.py` has decided."""
        match act:
            case ShowMessage(text):
                self.view.output("stderr", text.encode())
            case NoteFailure():
                self._note_end("failed")
            case SignalRanks(number, None) if number == STOP and self._elastic and not self._elastic.let_outside_go():
                self._held.append(act)
            case SignalRanks(number, marker):
                self._note_end("signal", number=number, **(marker or {}))
                if marker is not None:
                    leave_stop_marker(str(self.folder.path), marker)
                self.controller.signal_ranks(self.watch.ranks, number, marker=marker)
            case SignalEngine(number):
                self._note_end("ending" if number == signal.SIGTERM else "killing", signal=number)
                self._ending.ending_since = self._ending.ending_since or time.time()
                process.send_signal(number)

    def _note_end(self, kind: str, **values: Any) -> None:
        """Add an event of the end of a run to its history; on a full disk, what ended the run stays the reason."""
        try:
            append_event(self.folder, kind, **values)
        except OSError as error:
            self._ending.note_unusable_folder(error, ends_run=False)


def _now() -> float:
    """Return the seconds on a clock that continues while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _write_down(report: Report, folder: RunFolder) -> None:
    drop_evidence(folder.path, is_done=report.status == "done")
    with contextlib.suppress(OSError):  # a folder that cannot be written any more is the failure the report names
        write_report(report, folder)
        append_event(folder, "end", status=report.status, exit_status=report.exit_status)
        write_event_log(folder.path)


@contextmanager
def _signals(end: RunEnd) -> Iterator[None]:
    """Make signals such as Ctrl-C, SIGTERM and that of a closed terminal orders to end the run, not this process."""

    def note(number: int, _frame: object) -> None:
        end.order(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, TIME_LIMIT_SIGNAL)
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
