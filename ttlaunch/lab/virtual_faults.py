"""Faults on a virtual clock: what they do to ranks, and the verdict that a run would get.

The simulation says how each rank ended and when. What the shims of a run would have recorded follows from that, and the functions that
judge a run judge it: `conclude` finds the first failure, `judge` the rank on which a run hangs, `judge_faults` whether the fault is named.
"""

import math
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import Blame, Diagnostic, Label, LaunchError, has_errors, shown
from ttlaunch.engines.choose import ENGINES
from ttlaunch.hosts.transport.local import is_this_machine
from ttlaunch.lab.chaos.inject import FAULT
from ttlaunch.lab.chaos.verdict import Verdict, judge_faults
from ttlaunch.planning.fault_checks import check_faults, scope_of, targets_of
from ttlaunch.planning.faults import FLIPS, AtStep, Fault, Kind, Verb
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.records.endings import RankError, RankExit
from ttlaunch.records.ranks import Started
from ttlaunch.records.virtual import VirtualClass, VirtualEnd, VirtualError, VirtualMade
from ttlaunch.running.conclude import Ending, conclude
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.hang.hangs import FIRST_STEPS, FIRST_TIMEOUT_S, LEAST_TIMEOUT_S, SLOWEST_STEPS
from ttlaunch.running.hang.verdict import judge
from ttlaunch.running.hang.waits import Seen
from ttlaunch.running.lost_hosts import FENCE_S, cut_off
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState, Watch

_START = 1e9
"""When the run begins, in seconds since the epoch: any time, since records have times and not durations."""

_NOTICED_S = 0.25
"""How long a supervisor takes to notice the end of a rank and to end the others."""

_SIGNALS = {Verb.KILL: signal.SIGKILL, Verb.SEGV: signal.SIGSEGV, Verb.TERM: signal.SIGTERM}
_DEEDS = {Verb.KILL: "end", Verb.SEGV: "ask", Verb.TERM: "ask", Verb.STOP: "stop", Verb.CONTINUE: "continue"}


@dataclass(frozen=True)
class VirtualVerdict:
    """How a run with faults would end.

    Attributes:
        status, exit_status: Those of its report; an elastic run that waits for lost hosts without end is `waiting`, and has no exit status.
        failure: The first failure; None if there is none.
        faults: What came of each fault.
        over_s: When it would be over, or nothing more happens, in seconds after its start.
    """

    status: str
    exit_status: int | None
    failure: Failure | None
    faults: tuple[Verdict, ...]
    over_s: float

    @property
    def is_right(self) -> bool:
        """Whether the report would name the fault that ended the run."""
        return not any(one.outcome.is_wrong for one in self.faults)

    def as_json(self) -> dict[str, Any]:
        failure = None if self.failure is None else self.failure.as_json()
        known = {"status": self.status, "exit_status": self.exit_status, "over_s": self.over_s}
        return {**known, "failure": failure, "faults": [one.as_json() for one in self.faults]}


@dataclass(frozen=True)
class Patience:
    """How long a run waits, in seconds.

    Attributes:
        lease_s: For a host that is silent.
        hang_timeout_s: For progress; None: as long as a run does by default.
    """

    lease_s: float = contract.LEASE_S
    hang_timeout_s: float | None = None


def check_virtual_faults(faults: Sequence[Fault], plan: LaunchPlan) -> None:
    """Refuse faults that the plan's run cannot have, or that need values.

    Raises:
        LaunchError: There is one.
    """
    scope = scope_of(plan, is_here=all(map(is_this_machine, plan.hosts)))
    found = list(check_faults([one for one in faults if one.verb not in FLIPS], scope))
    found += [not_simulated(one, "no tensor has values on a virtual clock") for one in faults if one.verb in FLIPS]
    if has_errors(found):
        raise LaunchError(found)


def not_simulated(fault: Fault, reason: str) -> Diagnostic:
    """Return the refusal of a fault that only a run can have."""
    place = Label(fault.target_span, reason) if fault.target_span else None
    message = f"`{shown(str(fault))}` cannot be simulated"
    return Diagnostic("P037", message, place, hints=("`ttlaunch chaos` takes it",), blame=Blame.COMMAND_LINE)


def order_faults(faults: Sequence[Fault], plan: LaunchPlan) -> list[dict[str, Any]]:
    """Return the faults as the process of the ranks reads them: those that end or stop ranks, and the moments of all others."""
    found = []
    for fault in faults:
        is_of_ranks = fault.target.kind not in {Kind.AGENT, Kind.ENGINE, Kind.LAUNCHER, Kind.RUN}
        hit = targets_of(fault, plan.ranks) if is_of_ranks else ()
        found.append(
            {
                "deed": _DEEDS[fault.verb] if hit else "note",
                "ranks": [{"first": rank, "last": rank} for rank in hit],
                "step": fault.moment.step if isinstance(fault.moment, AtStep) else 0,
                "at_s": 0.0 if isinstance(fault.moment, AtStep) else fault.moment.milliseconds / 1e3,
            }
        )
    return found


def judge_virtually(
    plan: LaunchPlan, faults: Sequence[Fault], end: VirtualEnd, *, patience: Patience
) -> VirtualVerdict:
    """Return the verdict that a run would get whose ranks ended as those of a simulation did."""
    scene = _Scene(plan, faults, end, patience=patience)
    with tempfile.TemporaryDirectory(prefix="ttl-verdict-") as place:
        folder = RunFolder("virtual", Path(place))
        for name in (contract.LOGS_DIR, contract.RECORDS_DIR):
            folder.file(name).mkdir()
        watch = Watch(plan, folder)
        scene.record(watch.ranks)
        report = conclude(
            plan,
            folder,
            watch=watch,
            ending=scene.ending(),
            engine=ENGINES[0].never_started(),
            returncode=-signal.SIGKILL if scene.engine_is_killed else int(math.isfinite(scene.breaks_s)),
            duration_s=scene.over_s,
            leftovers=0,
        )
    failure = report.failure
    is_of_engine = failure is not None and failure.of_engine
    found = judge_faults(
        faults, list(scene.events()), report.as_json(), lease_s=patience.lease_s, engine_failed=is_of_engine
    )
    return VirtualVerdict(report.status, report.exit_status, failure, tuple(found), scene.over_s)


class _Scene:
    """What the supervisor of a run would see.

    Attributes:
        breaks_s: When the run would break; infinity if it would not.
        over_s: When it would be over. What happens later in the simulation never happens.
    """

    def __init__(self, plan: LaunchPlan, faults: Sequence[Fault], end: VirtualEnd, *, patience: Patience) -> None:
        self._plan, self._faults, self._patience = plan, faults, patience
        self._class_of: dict[int, VirtualClass] = {
            rank: one for one in end.classes for span in one.members for rank in range(span.first, span.last + 1)
        }
        self._errors: Mapping[int, VirtualError] = {one.rank: one for one in end.errors}
        made = sorted(end.made, key=lambda one: (one.at_s, one.index))
        self._quiet_s = self._timeout_s()
        moments = {
            "ranks": min((one.last_s for one in end.classes if one.end == "ended"), default=math.inf),
            "errors": min((one.at_s for one in end.errors), default=math.inf),
            "hosts": min((self._lost_s(one) for one in made if self._host_of(one)), default=math.inf),
            "engine": self._first(made, Kind.ENGINE),
            "order": min(self._first(made, Kind.RUN), self._first(made, Kind.LAUNCHER)),
            "hang": self._hangs_s(made, end),
        }
        self.breaks_s = min(moments.values())
        self.engine_is_killed = moments["engine"] == self.breaks_s < math.inf
        self._is_hung = moments["hang"] == self.breaks_s < math.inf
        last_s = max(one.last_s for one in end.classes)
        is_over = self.breaks_s > last_s and all(one.end == "done" for one in end.classes)
        is_over = is_over and moments["hosts"] == math.inf  # nobody knows how the ranks of a lost host ended
        self.over_s = last_s if is_over else self.breaks_s + _NOTICED_S
        self.breaks_s = math.inf if is_over else self.breaks_s
        self._made = [one for one in made if one.at_s <= self.over_s]
        self._lost = {
            host: one.at_s
            for one in reversed(self._made)
            if (host := self._host_of(one)) is not None and self._lost_s(one) <= self.over_s
        }

    def _first(self, made: Sequence[VirtualMade], kind: Kind) -> float:
        return min((one.at_s for one in made if self._faults[one.index].target.kind is kind), default=math.inf)

    def _host_of(self, made: VirtualMade) -> str | None:
        """Return the host that a fault takes from the run; None if it takes none."""
        fault = self._faults[made.index]
        loses = fault.verb is Verb.CUT or fault.target.kind is Kind.AGENT
        return str(fault.target.value) if loses else None

    def _lost_s(self, made: VirtualMade) -> float:
        return made.at_s + self._patience.lease_s + FENCE_S

    def _timeout_s(self) -> float:
        """Return after how much quiet time the run hangs."""
        if self._patience.hang_timeout_s is not None:
            return self._patience.hang_timeout_s
        classes = self._class_of.values()
        if max(one.last_step for one in classes) < FIRST_STEPS:
            return FIRST_TIMEOUT_S
        return max(LEAST_TIMEOUT_S, SLOWEST_STEPS * max(time_s for one in classes for time_s in (*one.each_s, 0.0)))

    def _hangs_s(self, made: Sequence[VirtualMade], end: VirtualEnd) -> float:
        """Return when the run hangs: so long after the last that any rank did, or after a stop that is continued too late."""
        stopped = [one for one in end.classes if one.end == "stopped"]
        found = [max(one.last_s for one in end.classes) + self._quiet_s] if stopped else []
        for index, one in enumerate(made):
            if self._faults[one.index].verb is Verb.STOP:
                hit = {(span.first, span.last) for span in one.ranks}
                later = [
                    other.at_s
                    for other in made[index:]
                    if self._faults[other.index].verb is Verb.CONTINUE
                    and hit & {(span.first, span.last) for span in other.ranks}
                ]
                found += [one.at_s + self._quiet_s] if later and min(later) > one.at_s + self._quiet_s else []
        return min(found, default=math.inf)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the run's history."""
        yield {"event": "start", "time": _START}
        for one in self._made:
            ranks = [rank for span in one.ranks for rank in range(span.first, span.last + 1)]
            fault = str(self._faults[one.index])
            known = {"index": one.index, "fault": fault, "step": one.step or None, "ranks": ranks}
            yield {"event": FAULT, "time": _START + one.at_s, **known}
        yield {"event": "end", "time": _START + self.over_s}

    def record(self, ranks: Sequence[RankState]) -> None:
        """Enter what the shims would have recorded."""
        for state in ranks:
            rank, one = state.row.rank, self._class_of[state.row.rank]
            state.phase, state.step, state.ready_time = Phase.RUNNING, one.last_step, _START
            state.started = Started(time=_START, pid=1)
            if state.row.host in self._lost:
                continue
            if rank in self._errors and self._errors[rank].at_s <= self.over_s:
                state.error = _error_of(self._errors[rank], role=state.row.role, step=one.last_step + 1)
                state.phase = Phase.FAILED
            state.exit = self._exit_of(rank, one)

    def _exit_of(self, rank: int, one: VirtualClass) -> RankExit | None:
        is_ours = one.last_s <= self.over_s
        if one.end == "ended" and is_ours:
            fault = self._ended_by(rank, one.last_s)
            if fault.target.kind is Kind.SHIM:
                return None
            return RankExit(rank=rank, time=_START + one.last_s, signal=_SIGNALS[fault.verb])
        if rank in self._errors and self._errors[rank].at_s <= self.over_s:
            return RankExit(rank=rank, time=_START + self._errors[rank].at_s, status=contract.STATUS_RANK_FAILED)
        if (one.end == "done" and is_ours) or self._signal() is not None:
            return RankExit(rank=rank, time=_START + min(one.last_s, self.over_s), status=0)
        if self.engine_is_killed:
            return None
        return RankExit(rank=rank, time=_START + self.over_s, signal=signal.SIGTERM)

    def _ended_by(self, rank: int, at_s: float) -> Fault:
        """Return the fault that ended a rank: the last one before its end."""
        hits = [
            self._faults[one.index]
            for one in self._made
            if one.at_s <= at_s and any(span.first <= rank <= span.last for span in one.ranks)
        ]
        return [one for one in hits if one.verb in _SIGNALS][-1]

    def _signal(self) -> int | None:
        """Return the signal by which somebody ordered the run to end; None if nobody did."""
        kinds = {self._faults[one.index].target.kind for one in self._made if one.at_s == self.breaks_s}
        return signal.SIGINT if Kind.RUN in kinds else signal.SIGTERM if Kind.LAUNCHER in kinds else None

    def ending(self) -> Ending:
        """Return what the supervisor would know at the end."""
        shims = {
            rank: _START + one.last_s
            for rank, one in self._class_of.items()
            if one.end == "ended"
            and one.last_s <= self.over_s
            and self._ended_by(rank, one.last_s).target.kind is Kind.SHIM
        }
        hang = self._hang() if self._is_hung else None
        ending = Ending(signal_number=self._signal(), lost_shims=shims, failure=hang)
        for host, at_s in self._lost.items():
            ending.away[host] = cut_off(host, last_heard=_START + at_s)
        return ending

    def _hang(self) -> Failure:
        stopped = {
            rank
            for one in self._made
            if self._faults[one.index].verb is Verb.STOP
            for span in one.ranks
            for rank in range(span.first, span.last + 1)
        }
        seen = [
            Seen(
                row.rank,
                row.role,
                row.host,
                None,
                is_stopped=row.rank in stopped and self._class_of[row.rank].end != "ended",
            )
            for row in self._plan.ranks
        ]
        return judge(seen, quiet_s=self._quiet_s, now=_START + self.breaks_s)


def _error_of(error: VirtualError, *, role: str, step: int) -> RankError:
    return RankError(
        type=error.type,
        module=error.module,
        message=error.message,
        file=error.file,
        line=error.line,
        step=step,
        role=role,
        time=_START + error.at_s,
        causes=(),
    )
