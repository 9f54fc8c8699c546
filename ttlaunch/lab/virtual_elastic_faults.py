"""Faults of an elastic run on a virtual clock: when they happen to which workers, and the verdict that a run would get."""

import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.contract import LEASE_S, worker_name
from ttlaunch.engines.choose import ENGINES
from ttlaunch.lab.chaos.inject import FAULT, MISSED
from ttlaunch.lab.chaos.verdict import Outcome, judge_faults
from ttlaunch.lab.virtual_faults import VirtualVerdict
from ttlaunch.lab.virtual_members import VirtualMembers
from ttlaunch.membership.coordinator_state import Phase as MembersPhase
from ttlaunch.planning.fault_checks import targets_of
from ttlaunch.planning.faults import NUMBERED, AtStep, Fault, Kind, Verb
from ttlaunch.planning.launch_plan import LaunchPlan, RankRow
from ttlaunch.records.endings import RankExit
from ttlaunch.records.ranks import Started
from ttlaunch.running.conclude import Ending, conclude
from ttlaunch.running.failures.name_cause import name_hung_worker
from ttlaunch.running.lost_hosts import cut_off
from ttlaunch.running.membership.members import NotAdmittedError
from ttlaunch.running.membership.membership import check_can_leave
from ttlaunch.running.membership.why_over import Ended, why_nobody_goes_on
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState, Watch

_START = 1e9  # when the run begins, in seconds since the epoch: any time
_ENDS = {Verb.KILL: signal.SIGKILL, Verb.SEGV: signal.SIGSEGV}

PLAYED = frozenset({*_ENDS, Verb.STOP, Verb.CONTINUE, Verb.CUT, Verb.JOIN, Verb.LEAVE})
"""The verbs that can happen."""

TARGETS = frozenset({Kind.RANK, Kind.ROLE, Kind.HOST, Kind.SHIM, Kind.RUN})
"""The kinds of what they can happen to."""

WAITING = "waiting"
"""The status of a run that waits for workers of lost hosts, until somebody ends it."""


class Happening:
    """Faults, each at its moment, as the injector of `ttlaunch chaos` chooses them.

    Attributes:
        events: What the history of the run would have of them.
        exits: How workers ended: the signal, or None where it was a shim that was killed.
        cuts: The hosts that were cut off, and when.
    """

    def __init__(
        self, faults: Sequence[Fault], rows: Sequence[RankRow], members: VirtualMembers, *, lease_s: float = LEASE_S
    ) -> None:
        """Make nothing yet; a host that is cut off counts as lost after `lease_s`."""
        self.lease_s = lease_s
        self.cuts: dict[str, float] = {}
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
        reached = [number for number in alive if members.hears(number)]
        match fault.verb:
            case Verb.JOIN:
                return self._let_join()
            case Verb.LEAVE:
                return self._let_leave(alive[0])
            case Verb.CUT:
                host = str(fault.target.value)
                self.cuts.setdefault(host, members.now)
                members.cut(host, lease_s=self.lease_s)
            case Verb.STOP:
                for number in reached:
                    members.stop(number)
            case Verb.CONTINUE:
                for number in reached:
                    members.let_go_on(number)
            case verb:
                is_shim = fault.target.kind is Kind.SHIM
                for number in reached:
                    self.exits[number] = None if is_shim else _ENDS[verb]
                    how = "was lost: its shim was killed" if is_shim else f"was killed by {_ENDS[verb].name}"
                    members.end(number, how)
        return ""

    def _let_join(self) -> str:
        members = self._members
        number = members.next_to_start()
        if number is None:
            return "every row of the plan has been started"
        host = self._rows[number].host
        if host in members.away:
            return f"rank {number} cannot start: host {host} is lost"
        members.start(number)
        return ""

    def _let_leave(self, number: int) -> str:
        members = self._members
        try:
            if number in members.coordinator.staying:
                check_can_leave(members.coordinator, number)
        except NotAdmittedError as error:
            return str(error)
        members.ask_to_leave(number)
        return ""


def judge_elastic(
    plan: LaunchPlan, faults: Sequence[Fault], members: VirtualMembers, *, happening: Happening
) -> VirtualVerdict:
    """Return the verdict that a run with these members would get."""
    assert plan.elastic is not None  # noqa: S101 - the run is elastic
    over_s, is_done = members.over_s or 0.0, members.coordinator.phase is MembersPhase.FINISHED
    if not is_done:
        over_s = max([over_s, *(cut_s + happening.lease_s for cut_s in happening.cuts.values())])
    with tempfile.TemporaryDirectory(prefix="ttl-verdict-") as place:
        folder = RunFolder("virtual", Path(place))
        for name in (contract.LOGS_DIR, contract.RECORDS_DIR):
            folder.file(name).mkdir()
        watch = Watch(plan, folder)
        outlived = _outlived(members, is_done=is_done)
        _record(watch.ranks, members, happening, is_done=is_done, outlived=outlived)
        report = conclude(
            plan,
            folder,
            watch=watch,
            ending=_ending(members, happening, watch.ranks, needed=plan.elastic.minimum, outlived=outlived),
            engine=ENGINES[0].never_started(),
            returncode=0 if is_done or members.waits else 1,
            duration_s=over_s,
            leftovers=0,
        )
    epochs = [{**vars(one), "time": _START + one.at_s} for one in members.epochs]
    found = judge_faults(
        faults, list(_events(members, happening)), {**report.as_json(), "epochs": epochs}, lease_s=happening.lease_s
    )
    if members.waits:
        awaited = [replace(one, outcome=Outcome.AWAITED) if one.outcome.is_wrong else one for one in found]
        return VirtualVerdict(WAITING, exit_status=None, failure=None, faults=tuple(awaited), over_s=over_s)
    return VirtualVerdict(report.status, report.exit_status, report.failure, tuple(found), over_s)


def _outlived(members: VirtualMembers, *, is_done: bool) -> frozenset[int]:
    """Return the workers whose end others have outlived, as in `ElasticRun`."""
    processes = members.processes
    gone = frozenset(number for number, one in processes.items() if one.gone_s is not None)
    if is_done or members.waits:
        return gone
    made = [one.members for one in members.epochs if one.done_s is not None]
    before = {number for numbers in made[:-1] for number in numbers}
    dismissed = {number for number in gone if processes[number].has_left}
    return frozenset(before.difference(*made[-1:]) | dismissed)


def _ending(
    members: VirtualMembers,
    happening: Happening,
    ranks: Sequence[RankState],
    *,
    needed: int,
    outlived: frozenset[int],
) -> Ending:
    """Return what the supervisor would know at the end."""
    processes, coordinator = members.processes, members.coordinator
    gone = frozenset(number for number, one in processes.items() if one.gone_s is not None)
    ending = Ending()
    is_done = coordinator.phase is MembersPhase.FINISHED
    has_failed = not is_done and not members.waits
    for host, cut_s in happening.cuts.items():
        # The launcher cannot end what is on a silent host: a run that fails meanwhile ends when the lease does.
        if host in members.away or has_failed:
            ending.away[host] = cut_off(host, last_heard=_START + cut_s)
    ending.tolerate(outlived, ranks)
    ending.too_late = frozenset(processes) - gone if is_done else frozenset()
    shims = [number for number in gone if number in happening.exits and happening.exits[number] is None]
    ending.lost_shims = {number: _START + (processes[number].gone_s or 0.0) for number in shims}
    if has_failed:
        left = [state for state in ranks if state.phase is not Phase.ABSENT and state.row.rank not in outlived]
        ended = _ended(members, ranks, outlived=outlived)
        over_s, notice_s = members.over_s or 0.0, members.costs.notice_s
        # The launcher has no record yet of an end that it has not noticed, and needs none of those that it has killed itself.
        known = {
            number for number in gone - ended.hung.keys() if (processes[number].gone_s or 0.0) + notice_s <= over_s
        }
        is_of_a_worker = any(
            (state.phase is Phase.FAILED and state.row.rank in known) or (state.exit is None and ending.why_lost(state))
            for state in left
        )
        ending.failure = why_nobody_goes_on(
            coordinator, ended, is_of_a_worker=is_of_a_worker, needed=needed, at=_START + over_s, next_step=""
        )
        if ending.failure is None or ending.failure.rank is None:
            ending.tolerate(outlived | ended.hung.keys(), ranks)
    return ending


def _ended(members: VirtualMembers, ranks: Sequence[RankState], *, outlived: frozenset[int]) -> Ended:
    """Return what the supervisor would know of the workers that have ended."""
    processes = members.processes
    hung = {
        state.row.rank: name_hung_worker(state, one.hung, time=_START + one.gone_s)
        for state in ranks
        if (one := processes.get(state.row.rank)) is not None and one.hung and one.gone_s is not None
    }
    lost = sorted((one.lost_s, number) for number, one in processes.items() if one.lost_s is not None)
    return Ended(
        why={number: one.why for number, one in processes.items() if one.why},
        lost={number: processes[number].state.applied is not None for _, number in lost if number not in outlived},
        hung=hung,
    )


def _record(
    ranks: Sequence[RankState],
    members: VirtualMembers,
    happening: Happening,
    *,
    is_done: bool,
    outlived: frozenset[int],
) -> None:
    """Enter what the shims would have recorded, or the launcher in place of those of a lost host."""
    for state in ranks:
        rank = state.row.rank
        process = members.processes.get(rank)
        if process is None:
            state.phase = Phase.ABSENT
            continue
        state.phase, state.step, state.ready_time = Phase.RUNNING, process.reported, _START + process.started_s
        state.started = Started(time=_START + process.started_s, pid=1)
        time = _START + (process.gone_s if process.gone_s is not None else members.over_s or 0.0)
        how = happening.exits.get(rank, signal.SIGKILL)  # one that makes no progress is killed
        if process.gone_s is None:
            state.exit = (
                RankExit(rank=rank, time=time, status=0)
                if is_done
                else RankExit(rank=rank, time=time, signal=signal.SIGTERM)
            )
        elif process.has_left:
            state.exit = RankExit(rank=rank, time=time, status=0)
        elif how is not None and (members.hears(rank) or rank in outlived):
            state.exit, state.phase = RankExit(rank=rank, time=time, signal=how), Phase.FAILED


def _events(members: VirtualMembers, happening: Happening) -> Iterator[dict[str, Any]]:
    """Yield the run's history."""
    yield {"event": "start", "time": _START}
    yield from happening.events
    for number, one in members.processes.items():
        if one.lost_s is not None:
            yield {"event": "worker_lost", "time": _START + one.lost_s, "worker": worker_name(number)}
    yield {"event": "end", "time": _START + (members.over_s or 0.0)}
