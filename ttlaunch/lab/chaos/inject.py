"""Inject the planned faults into an active run, each at its moment, and record when.

An `Injector` is between the supervisor and the view: every record and every tick passes through it, so it knows what the
supervisor knows, and acts on ranks and hosts through the same controller. The run's history gets a `fault` for each fault,
and a `fault_missed` for each that could not be injected.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttlaunch import contract
from ttlaunch.agent.run_processes import is_gone, signal_process
from ttlaunch.app.workers import remove_worker
from ttlaunch.diagnostics import LaunchError
from ttlaunch.errors import HostError
from ttlaunch.hosts.transport.pushed import start_script
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.planning.fault_checks import targets_of
from ttlaunch.planning.faults import FLIPS, NUMBERED, AtStep, Fault, Kind, Verb
from ttlaunch.records.audits import FLIPPED
from ttlaunch.records.ranks import AnyProgress, Note
from ttlaunch.running.logs.output import View
from ttlaunch.running.rank_controller import RankController
from ttlaunch.running.runs.run_folder import RunFolder, append_event, read_events
from ttlaunch.running.watch import Phase, RankState

FAULT, MISSED = "fault", "fault_missed"
_SIGNALS = {
    Verb.KILL: signal.SIGKILL,
    Verb.STOP: signal.SIGSTOP,
    Verb.CONTINUE: signal.SIGCONT,
    Verb.TERM: signal.SIGTERM,
    Verb.SEGV: signal.SIGSEGV,
}
_REMOTE_S = 5.0


@dataclass(frozen=True)
class _Started:
    """The start of the engine, in seconds since the epoch, and its process id; None if agents started the ranks."""

    time: float
    engine: int | None


class _NotPossibleError(Exception):
    """A fault cannot be injected; the text says why."""


class Injector:
    """A view that injects faults into the run that it shows."""

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        view: View,
        controller: RankController,
        folder: RunFolder,
        scratch: Path,
        elsewhere: Mapping[str, Transport] | None = None,
    ) -> None:
        """Prepare the faults.

        Args:
            faults: The faults in the order of the plan.
            view: The view that shows the run.
            controller: Signals ranks and disconnects hosts.
            folder: The run's folder.
            scratch: The run's folder in shared memory, which has the same path on every host.
            elsewhere: Connected hosts by name, for faults of shims and agents, which the controller cannot signal.
        """
        self._pending = list(enumerate(faults))
        self._view = view
        self._controller = controller
        self._folder = folder
        self._scratch = scratch
        self._elsewhere = elsewhere or {}
        self._started: _Started | None = None

    def output(self, stream: str, line: bytes) -> None:
        self._view.output(stream, line)

    def record(self, state: RankState, record: AnyProgress) -> None:
        if isinstance(record, Note) and record.text.startswith(FLIPPED):
            self._note_flip(state)
        self._view.record(state, record)

    def _note_flip(self, state: RankState) -> None:
        """Enter the flip that a rank has made itself into the run's history."""
        rank = state.row.rank
        made = [one for one in self._pending if one[1].verb in FLIPS and one[1].target.value == rank]
        for index, fault in made[:1]:
            self._pending.remove((index, fault))
            append_event(self._folder, FAULT, index=index, fault=str(fault), step=state.step or None, ranks=[rank])

    def tick(self, ranks: list[RankState]) -> None:
        """Inject the faults whose moment has come, unless the run has ended."""
        self._started = self._started or _read_start(self._folder)
        if self._started is not None and not (self._started.engine and is_gone(self._started.engine)):
            now = time.time()
            due = [one for one in self._pending if self._is_due(one[1], ranks, now - self._started.time)]
            self._pending = [one for one in self._pending if one not in due]
            for index, fault in due:
                self._inject(index, fault, ranks)
        self._view.tick(ranks)

    def _is_due(self, fault: Fault, ranks: Sequence[RankState], elapsed_s: float) -> bool:
        """Whether a fault's moment has come, and the processes that it hits have started."""
        if fault.verb in FLIPS:
            return False  # the rank does it itself, and says so
        hit = _hit(fault, ranks)
        if any(not state.started and state.exit is None for state in hit):
            return False
        if isinstance(fault.moment, AtStep):
            return _furthest(hit or ranks) >= fault.moment.step
        return elapsed_s * 1000 >= fault.moment.milliseconds

    def _inject(self, index: int, fault: Fault, ranks: list[RankState]) -> None:
        hit = _hit(fault, ranks)
        alive = [state for state in hit if state.exit is None]
        step = _furthest(hit or ranks) or None
        known = {"index": index, "fault": str(fault), "step": step}
        if hit and not alive:
            reason = "its ranks had ended" if len(hit) > 1 else f"rank {hit[0].row.rank} had ended"
            append_event(self._folder, MISSED, **known, reason=reason)
            return
        if fault.target.kind is Kind.ENGINE and self._started is not None and self._started.engine is None:
            append_event(self._folder, MISSED, **known, reason="no process of the engine runs on this machine")
            return
        # This precedes the action: a fault that kills this very process must be in the history too.
        append_event(self._folder, FAULT, **known, ranks=[state.row.rank for state in alive])
        try:
            self._act(fault, alive, ranks)
        except _NotPossibleError as error:
            append_event(self._folder, MISSED, **known, reason=str(error))
        except HostError as error:
            append_event(self._folder, MISSED, **known, reason=f"{error.host} could not be reached: {error.evidence}")

    def _act(self, fault: Fault, alive: Sequence[RankState], ranks: Sequence[RankState]) -> None:
        match fault.target.kind:
            case Kind.RUN if fault.verb is Verb.JOIN:
                self._let_join(ranks)
            case Kind.RANK if fault.verb is Verb.LEAVE:
                self._let_leave(alive[0])
            case Kind.RUN:
                os.kill(os.getpid(), signal.SIGINT)
            case Kind.LAUNCHER:
                os.kill(os.getpid(), _SIGNALS[fault.verb])
            case Kind.ENGINE if self._started is not None and self._started.engine is not None:
                signal_process(self._started.engine, _SIGNALS[fault.verb], run_id=self._folder.run_id)
            case Kind.SHIM:
                for state in alive:
                    shim = state.started.shim_pid if state.started else None
                    self._signal(state.row.host, shim, _SIGNALS[fault.verb])
            case Kind.AGENT:
                self._signal(str(fault.target.value), None, _SIGNALS[fault.verb])
            case Kind.HOST if fault.verb is Verb.CUT:
                self._controller.cut(str(fault.target.value))
            case _:
                self._controller.signal_ranks(alive, _SIGNALS[fault.verb])

    def _let_join(self, ranks: Sequence[RankState]) -> None:
        """Start the next worker, on the host that the plan has for it."""
        try:
            self._controller.add([_next_to_join(ranks)])
        except ValueError as error:  # its host is lost, or the last rank of the run has ended
            raise _NotPossibleError(str(error)) from None

    def _let_leave(self, state: RankState) -> None:
        """Ask the coordinator of the run to let a worker leave, as its owner may."""
        try:
            remove_worker(self._folder.path, contract.worker_name(state.row.rank))
        except LaunchError as error:
            raise _NotPossibleError(error.diagnostics[0].message) from None

    def _signal(self, host: str, pid: int | None, number: int) -> None:
        """Send a signal to a shim; without a process id, to the agent of the host."""
        run_id = self._folder.run_id
        transport = self._elsewhere.get(host)
        if transport is None:
            if pid is not None:
                signal_process(pid, number, run_id=run_id)
            return
        arguments = {"run_id": run_id, "pid": pid, "number": number, "scratch": str(self._scratch)}
        beside = ("run_processes",)
        stream = start_script(transport, "send_signal", beside=beside, arguments=arguments, timeout_s=_REMOTE_S)
        stream.expect(timeout_s=_REMOTE_S)


def _hit(fault: Fault, ranks: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that a fault hits; of a whole role or host, those that have been started."""
    present = ranks if fault.target.kind in NUMBERED else [one for one in ranks if one.phase is not Phase.ABSENT]
    numbers = targets_of(fault, [state.row for state in present])
    return [state for state in present if state.row.rank in numbers]


def _next_to_join(ranks: Sequence[RankState]) -> RankState:
    absent = [state for state in ranks if state.phase is Phase.ABSENT]
    if not absent:
        raise _NotPossibleError("every row of the plan has been started")
    return absent[0]


def _furthest(ranks: Sequence[RankState]) -> int:
    return max((state.step for state in ranks), default=0)


def _read_start(folder: RunFolder) -> _Started | None:
    for event in read_events(folder.path):
        if event.get("event") == "start":
            engine = event.get(contract.ENGINE_PROCESS)
            return _Started(event["time"], engine if isinstance(engine, int) else None)
    return None
