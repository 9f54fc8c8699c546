"""Faults of an elastic run on a virtual clock: when they happen to which workers, and the verdict that a run would get."""

import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.contract import worker_name
from ttlaunch.engines.choose import ENGINES
from ttlaunch.lab.chaos.inject import FAULT, MISSED
from ttlaunch.lab.chaos.verdict import judge_faults
from ttlaunch.lab.virtual_faults import VirtualVerdict
from ttlaunch.lab.virtual_members import VirtualMembers
from ttlaunch.membership.coordinator_state import Phase as MembersPhase
from ttlaunch.planning.fault_checks import targets_of
from ttlaunch.planning.faults import NUMBERED, AtStep, Fault, Kind, Verb
from ttlaunch.planning.launch_plan import LaunchPlan, RankRow
from ttlaunch.records.endings import RankExit
from ttlaunch.records.ranks import Started
from ttlaunch.running.conclude import Ending, conclude
from ttlaunch.running.membership.elastic_run import few_are_left
from ttlaunch.running.membership.members import NotAdmittedError
from ttlaunch.running.membership.membership import check_can_leave
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState, Watch

_START = 1e9  # when the run begins, in seconds since the epoch: any time
_ENDS = {Verb.KILL: signal.SIGKILL, Verb.SEGV: signal.SIGSEGV}

PLAYED = frozenset({*_ENDS, Verb.STOP, Verb.JOIN, Verb.LEAVE})
"""The verbs that can happen."""

TARGETS = frozenset({Kind.RANK, Kind.ROLE, Kind.HOST, Kind.SHIM, Kind.RUN})
"""The kinds of what they can happen to."""


class Happening:
    """Faults, each at its moment, as the injector of `ttlaunch chaos` chooses them.

    Attributes:
        events: What the history of the run would have of them.
        exits: How and when workers ended: the signal, or None where it was a shim that was killed.
    """

    def __init__(self, faults: Sequence[Fault], rows: Sequence[RankRow], members: VirtualMembers) -> None:
        self._pending = list(enumerate(faults))
        self._rows, self._members = rows, members
        self.events: list[dict[str, Any]] = []
        self.exits: dict[int, signal.Signals | None] = {}
        members.on_step = self.look
        for fault in faults:
            if not isinstance(fault.moment, AtStep):
                members.at(fault.moment.milliseconds / 1e3, self.look)

    def look(self) -> None:
        """Make the faults whose moment has come."""
        due = [one for one in self._pending if self._is_due(one[1])]
        self._pending = [one for one in self._pending if one not in due]
        for index, fault in due:
            self._make(index, fault)

    def _hit(self, fault: Fault) -> list[int]:
        present = self._members.processes
        rows = [row for row in self._rows if fault.target.kind in NUMBERED or row.rank in present]
        return list(targets_of(fault, rows))

    def _is_due(self, fault: Fault) -> bool:
        processes, hit = self._members.processes, self._hit(fault)
        if any(number not in processes for number in hit):
            return False
        if isinstance(fault.moment, AtStep):
            return max((processes[number].reported for number in hit or processes), default=0) >= fault.moment.step
        return self._members.now * 1000 >= fault.moment.milliseconds

    def _make(self, index: int, fault: Fault) -> None:
        processes, hit = self._members.processes, self._hit(fault)
        alive = [number for number in hit if processes[number].gone_s is None]
        step = max((processes[number].reported for number in hit or processes), default=0) or None
        known = {"index": index, "fault": str(fault), "step": step, "time": _START + self._members.now}
        if hit and not alive:
            reason = "its ranks had ended" if len(hit) > 1 else f"rank {hit[0]} had ended"
            self.events.append({"event": MISSED, **known, "reason": reason})
            return
        self.events.append({"event": FAULT, **known, "ranks": alive})
        reason = self._act(fault, alive)
        if reason:
            self.events.append({"event": MISSED, **known, "reason": reason})

    def _act(self, fault: Fault, alive: Sequence[int]) -> str:
        """Make a fault; returns why that is not possible, or nothing."""
        members = self._members
        match fault.verb:
            case Verb.JOIN:
                return "" if members.start_next() is not None else "every row of the plan has been started"
            case Verb.LEAVE:
                try:
                    if alive[0] in members.coordinator.staying:
                        check_can_leave(members.coordinator, alive[0])
                except NotAdmittedError as error:
                    return str(error)
                members.ask_to_leave(alive[0])
            case Verb.STOP:
                for number in alive:
                    self.exits[number] = signal.SIGKILL
                    members.stop(number)
            case verb:
                is_shim = fault.target.kind is Kind.SHIM
                for number in alive:
                    self.exits[number] = None if is_shim else _ENDS[verb]
                    how = "was lost: its shim was killed" if is_shim else f"was killed by {_ENDS[verb].name}"
                    members.end(number, how)
        return ""


def judge_elastic(
    plan: LaunchPlan, faults: Sequence[Fault], members: VirtualMembers, *, happening: Happening
) -> VirtualVerdict:
    """Return the verdict that a run with these members would get."""
    over_s, is_done = members.over_s or 0.0, members.coordinator.phase is MembersPhase.FINISHED
    with tempfile.TemporaryDirectory(prefix="ttl-verdict-") as place:
        folder = RunFolder("virtual", Path(place))
        for name in (contract.LOGS_DIR, contract.RECORDS_DIR):
            folder.file(name).mkdir()
        watch = Watch(plan, folder)
        _record(watch.ranks, members, happening, is_done=is_done)
        report = conclude(
            plan,
            folder,
            watch=watch,
            ending=_ending(plan, members, happening, is_done=is_done),
            engine=ENGINES[0].never_started(),
            returncode=0 if is_done else 1,
            duration_s=over_s,
            leftovers=0,
        )
    epochs = [{**vars(one), "time": _START + one.at_s} for one in members.epochs]
    found = judge_faults(faults, list(_events(members, happening)), {**report.as_json(), "epochs": epochs})
    return VirtualVerdict(report.status, report.exit_status, report.failure, tuple(found), over_s)


def _ending(plan: LaunchPlan, members: VirtualMembers, happening: Happening, *, is_done: bool) -> Ending:
    """Return what the supervisor would know at the end: whose end the others have outlived, as in `ElasticRun`."""
    processes = members.processes
    gone = frozenset(number for number, one in processes.items() if one.gone_s is not None)
    made = [one.members for one in members.epochs if one.done_s is not None]
    before = {number for numbers in made[:-1] for number in numbers}
    dismissed = {number for number in gone if processes[number].has_left}
    outlived = frozenset(before.difference(*made[-1:]) | dismissed)
    ending = Ending(tolerated=gone if is_done else outlived)
    ending.too_late = frozenset(processes) - gone if is_done else frozenset()
    shims = [number for number in gone if happening.exits.get(number, signal.SIGKILL) is None]
    ending.lost_shims = {number: _START + (processes[number].gone_s or 0.0) for number in shims}
    if members.is_short:
        assert plan.elastic is not None  # noqa: S101 - the run is elastic
        why = [f"{worker_name(number)} {one.why}" for number, one in sorted(processes.items()) if one.why]
        needed, left = plan.elastic.minimum, len(members.coordinator.workers)
        ending.failure = few_are_left(left, needed=needed, at=_START + (members.over_s or 0.0), why=why)
    return ending


def _record(ranks: Sequence[RankState], members: VirtualMembers, happening: Happening, *, is_done: bool) -> None:
    """Enter what the shims would have recorded."""
    for state in ranks:
        rank = state.row.rank
        process = members.processes.get(rank)
        if process is None:
            state.phase = Phase.ABSENT
            continue
        state.phase, state.step, state.ready_time = Phase.RUNNING, process.reported, _START + process.started_s
        state.started = Started(time=_START + process.started_s, pid=1)
        time = _START + (process.gone_s if process.gone_s is not None else members.over_s or 0.0)
        if process.gone_s is None:
            state.exit = (
                RankExit(rank=rank, time=time, status=0)
                if is_done
                else RankExit(rank=rank, time=time, signal=signal.SIGTERM)
            )
        elif process.has_left:
            state.exit = RankExit(rank=rank, time=time, status=0)
        elif (how := happening.exits.get(rank)) is not None:
            state.exit, state.phase = RankExit(rank=rank, time=time, signal=how), Phase.FAILED


def _events(members: VirtualMembers, happening: Happening) -> Iterator[dict[str, Any]]:
    """Yield the run's history."""
    yield {"event": "start", "time": _START}
    yield from happening.events
    for number, one in members.processes.items():
        if one.lost_s is not None:
            yield {"event": "worker_lost", "time": _START + one.lost_s, "worker": worker_name(number)}
    yield {"event": "end", "time": _START + (members.over_s or 0.0)}
