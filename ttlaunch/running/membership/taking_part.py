"""Supervise the one rank of a worker that has joined a run from this machine, until it has ended.

The rank has a run folder of its own here, with its plan, its logs and its records. What it tells the run goes through the link; so do
the orders for it. The run decides when it ends; the user of this machine can have it leave.
"""

import contextlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Thread

from ttlaunch import contract
from ttlaunch.engines.base import Engine, EngineProcess
from ttlaunch.engines.process import end_process
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.running.conclude import Ending, conclude
from ttlaunch.running.ending import AFTER_TERM_S
from ttlaunch.running.logs.output import EngineOutput, SilentView
from ttlaunch.running.membership.client import NoAnswerError, RefusedError
from ttlaunch.running.membership.link import CoordinatorLink, Why
from ttlaunch.running.rank_controller import RankController, engine_variables
from ttlaunch.running.report import Report, write_report
from ttlaunch.running.runs.files import Tail
from ttlaunch.running.runs.run_folder import RunFolder, append_event
from ttlaunch.running.watch import Phase, RankState, Watch

_LOOK_S = 0.02
_LOOK_BYTES = 1024 * 1024
_FACTS_S = 1.0
_GOODBYE_S = 2.0
_PATIENCE_S = 20.0
"""How long a rank that the run has let go may take to end by itself."""


class Outcome(StrEnum):
    """How taking part has ended."""

    DONE = "done"  # the run has finished
    LEFT = "left"  # it was asked to leave, here or at the run
    ENDED = "ended"  # the user of this machine did not want to wait for the boundary
    CUT_OFF = "cut off"  # the run takes nothing more from it
    FAILED = "failed"  # the rank failed


@dataclass(frozen=True)
class Participation:
    """How a worker took part.

    Attributes:
        text: Why it ended, in one clause; empty if there is nothing to say.
        report: The rank's own report.
    """

    outcome: Outcome
    text: str
    report: Report


@dataclass
class Wish:
    """What the user of this machine wants; a signal handler only counts."""

    times: int = 0

    def note(self, _number: int) -> None:
        self.times += 1


@dataclass
class JoinedRank:
    """One rank on this machine that takes part in a run elsewhere.

    Attributes:
        plan: Has one row that is meant, the last one.
        folder: The rank's own run folder; the plan is in it.
        scratch: The private folder in which the rank's socket for orders is.
        watch: Follows the records of this folder.
        controller: Reaches the rank's processes.
        link: The connection to the coordinator; it has been started.
    """

    plan: LaunchPlan
    folder: RunFolder
    scratch: Path
    watch: Watch
    controller: RankController
    link: CoordinatorLink
    engine: Engine
    _ending: Ending = field(default_factory=Ending)
    _obeyed: int = 0
    _left_after: int | None = None
    _leaving: Thread | None = None
    _let_go: float | None = None
    _has_registered: bool = False
    _facts_due: float = 0.0

    @property
    def state(self) -> RankState:
        return self.watch.ranks[-1]

    def take_part(self, wish: Wish, environment: Mapping[str, str]) -> Participation:
        """Start the rank, pass records and orders on until it has ended, and say how.

        Args:
            wish: Counts how often the user asked to end: once to leave at the next boundary, twice to end at once.
            environment: The variables that the rank inherits.
        """
        plan, folder, started = self.plan, self.folder, time.monotonic()
        variables = engine_variables(plan, folder.run_id, environment, controller=self.controller, scratch=self.scratch)
        tail = Tail(folder.file(contract.progress_file(self.state.row.rank)))
        process = self.controller.start(
            self.engine, plan.engine, folder=folder.path, environment=variables, rows=plan.ranks
        )
        append_event(folder, "start", engine=plan.engine.name, plan=plan.hash)
        try:
            self.controller.add([self.state])
            self.controller.add_no_more()
            self._follow(process, tail, wish)
        finally:
            self._ending.killing_since = time.time()
            end_process(process, patience_s=AFTER_TERM_S)
            leftovers = self.controller.end(lambda: None)
            self._say_goodbye(tail)
        report = conclude(
            plan,
            folder,
            watch=self.watch,
            ending=self._ending,
            engine=self.engine,
            returncode=process.wait(),
            duration_s=time.monotonic() - started,
            leftovers=leftovers,
        )
        found = self._participation(report, wish)
        with contextlib.suppress(OSError):
            write_report(report, folder)
            append_event(folder, "end", status=report.status, exit_status=report.exit_status)
        return found

    def _follow(self, process: EngineProcess, tail: Tail, wish: Wish) -> None:
        with EngineOutput(process, self.folder.file(contract.LOGS_DIR), SilentView()) as output:
            while process.poll() is None:
                output.read(_LOOK_S)
                self._pass_on(tail)
                self._heed(wish, process)
                self._heed_link(process)
            output.drain()

    def _say_goodbye(self, tail: Tail) -> None:
        self.watch.read_all()
        self.link.report(tail.read())
        if self._leaving is not None:  # the order to go may come before the answer
            self._leaving.join(_GOODBYE_S)
        self.link.close()

    def _pass_on(self, tail: Tail) -> None:
        """Send new records up and orders down."""
        lines = list(tail.read(most=_LOOK_BYTES))
        if lines:
            self._has_registered = self._has_registered or any(b'"member"' in line for line in lines)
            self.link.report(lines)
        for _ in self.watch.look():
            pass
        for order in self.link.take():
            self.controller.tell(self.state.row.rank, order)
        now = time.monotonic()
        if now >= self._facts_due:
            self._facts_due = now + _FACTS_S
            self._note_facts()

    def _note_facts(self) -> None:
        state, beat = self.state, self.link.beat
        beat.step, beat.loss, beat.tokens_per_s = state.step, state.loss, state.own_per_s("tokens")
        beat.phase = str(state.phase)
        beat.memory_bytes = _resident_bytes(state.started.pid) if state.started else None

    def _heed(self, wish: Wish, process: EngineProcess) -> None:
        """Do what the user of this machine asks for."""
        if wish.times > self._obeyed:
            self._obeyed = wish.times
            if wish.times == 1 and self._has_registered:
                self.link.report_progress("asked to leave at the next boundary of a step; again, and it ends at once")
                self._leaving = Thread(target=self._leave, name="leave", daemon=True)
                self._leaving.start()
            elif self._ending.terminated is None:
                self._end(process, signal.SIGINT)

    def _leave(self) -> None:
        try:
            self._left_after = self.link.leave()
        except (NoAnswerError, RefusedError) as error:
            self.link.report_progress(f"the run does not let it leave: {error}")
        else:
            self.link.report_progress(f"leaves after step {self._left_after}")

    def _heed_link(self, process: EngineProcess) -> None:
        """End the rank if the run takes nothing more from it; one that was let go may end by itself."""
        end = self.link.end
        if end is None or self._ending.terminated is not None:
            return
        now = time.monotonic()
        self._let_go = now if self._let_go is None else self._let_go
        if not end.is_friendly or now - self._let_go > _PATIENCE_S:
            self._end(process, signal.SIGTERM)

    def _end(self, process: EngineProcess, number: int) -> None:
        self._ending.signal_number = number
        self._ending.since = self._ending.since or time.monotonic()
        self._ending.terminated, self._ending.ending_since = time.monotonic(), time.time()
        process.terminate()

    def _participation(self, report: Report, wish: Wish) -> Participation:
        end = self.link.end
        if end is not None and not end.is_friendly:
            return Participation(Outcome.CUT_OFF, end.text, report)
        if self._ending.terminated is not None and wish.times:
            return Participation(Outcome.ENDED, "", report)
        if report.failure is not None:
            return Participation(Outcome.FAILED, "", report)
        if self._left_after is not None:
            return Participation(Outcome.LEFT, f"after step {self._left_after}", report)
        if end is not None and end.why is Why.DISMISSED and self.state.phase is not Phase.FAILED:
            return Participation(Outcome.LEFT, end.text, report)
        return Participation(Outcome.DONE, "", report)


def _resident_bytes(pid: int) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
