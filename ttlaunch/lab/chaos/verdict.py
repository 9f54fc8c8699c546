"""Judge a run with injected faults: which fault ended it, and whether the report names that fault.

The verdict is a pure function of the plan of faults, the run's history and its report. The report must name the first fault
that breaks the run. A stopped rank breaks the run only if it is never continued and nothing else breaks the run first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from ttlaunch import contract
from ttlaunch.lab.chaos.inject import FAULT, MISSED
from ttlaunch.planning.faults import ELASTIC, FLIPS, Fault, Kind, Verb
from ttlaunch.running.failures.causes import Cause

_SAME_MOMENT_S = 0.1
"""Faults within this time count as simultaneous: the report may name any of them."""
_REPORTED_S = 1.0
"""So long after it was continued, a worker of an elastic run has reported, which it does twice a second."""
_ENDS_AWAKE = {Verb.TERM, Verb.SEGV}  # a stopped process takes these signals when it is continued
_TERM_ENDS = {Cause.ENDED, Cause.EXITED, Cause.KILLED, Cause.RAISED, Cause.LEFT_EARLY}
_CAUSES = {
    Verb.KILL: {Cause.KILLED},
    Verb.SEGV: {Cause.CRASHED},
    Verb.TERM: _TERM_ENDS,
    Verb.STOP: {Cause.HUNG},
}


class Outcome(StrEnum):
    """The outcome of a fault."""

    NAMED = "named"  # it broke the run, and the report names it
    MISNAMED = "misnamed"  # it broke the run, and the report names something else
    UNNOTICED = "unnoticed"  # it was injected, and the run ended as if it had not been
    ENDURED = "endured"  # it was harmless, and the run did not fail
    REPLACED = "replaced"  # it ended workers of an elastic run, and the others went on to the end
    AWAITED = (
        "awaited"  # it took workers from an elastic run on a virtual clock, which waits for their host without end
    )
    OVERTAKEN = "overtaken"  # something else broke the run first, or ended its workers of an elastic run
    NOT_MADE = "not made"  # the run had ended, or the fault could not be injected

    @property
    def is_wrong(self) -> bool:
        return self in {Outcome.MISNAMED, Outcome.UNNOTICED}


@dataclass(frozen=True)
class Verdict:
    """A fault with its outcome.

    Attributes:
        fault: The fault as it is typed in a plan.
        reason: Why the fault was not injected; None if it was.
        ranks: The ranks that it hit.
        step: The step that its target had reported at the injection.
        at_s: When it was injected, in seconds after the start of the run.
        detected_s: The time from the fault to its detection: the end of a rank, the diagnosis of a hang, or the first
            reaction to a silent host.
        over_s: The time from the fault to the end of the run.
    """

    fault: str
    outcome: Outcome
    reason: str | None = None
    ranks: tuple[int, ...] = ()
    step: int | None = None
    at_s: float | None = None
    detected_s: float | None = None
    over_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "outcome": str(self.outcome), "ranks": list(self.ranks)}


@dataclass(frozen=True)
class _Injected:
    """A fault that was injected.

    Attributes:
        breaks_at: When it breaks the run, in seconds since the epoch: at once, when its rank is continued, or never (infinity).
        is_named: Whether the report says that this fault ended the run.
    """

    index: int
    fault: Fault
    time: float
    ranks: frozenset[int]
    step: int | None
    breaks_at: float
    is_named: bool


@dataclass(frozen=True)
class _Loss:
    """What became of the workers of an elastic run that a fault hit.

    Attributes:
        outcome: `REPLACED` if the fault ended them, and others went on; `OVERTAKEN` if something else ended them before it took effect.
        time: When the run knew that the workers were gone; None unless they are replaced.
    """

    outcome: Outcome
    time: float | None = None


def judge_faults(
    faults: Sequence[Fault],
    events: Sequence[Mapping[str, Any]],
    report: Mapping[str, Any],
    *,
    lease_s: float = contract.LEASE_S,
    engine_failed: bool = False,
) -> list[Verdict]:
    """Judge every fault, in the order of the plan.

    Args:
        faults: The plan.
        events: The events of the run's history, as `read_events` returns them.
        report: `report.json`.
        lease_s: How long a host may be silent; soon after that it counts as lost.
        engine_failed: Whether the engine failed and no rank did; `report.json` has no key for this.
    """
    lost_after_s = lease_s + contract.AFTER_LEASE_S
    injected = _injected(faults, events, report, lost_after_s=lost_after_s, engine_failed=engine_failed)
    missed = {event["index"]: str(event["reason"]) for event in events if event.get("event") == MISSED}
    injected = [one for one in injected if one.index not in missed]
    losses = {
        one.index: loss
        for one in injected
        if (loss := _loss_by(one, injected, events=events, report=report)) is not None
    }
    breaking = sorted(
        (one for one in injected if one.index not in losses and not _is_harmless(one, injected)),
        key=lambda one: (one.breaks_at, one.time),
    )
    first = breaking[0] if breaking and not _broke_before(breaking[0], report) else None
    together = [one for one in breaking if first and one.breaks_at <= first.breaks_at + _SAME_MOMENT_S]
    together = together if first and math.isfinite(first.breaks_at) else breaking
    named = next((one for one in together if first and one.is_named), None)
    by_index = {one.index: one for one in injected}
    verdicts = []
    for index, fault in enumerate(faults):
        one = by_index.get(index)
        if one is None:
            reason = missed.get(index, "the run had ended")
            verdicts.append(Verdict(str(fault), Outcome.NOT_MADE, reason))
        else:
            outcome = _outcome(one, first, named, breaking=breaking, report=report)
            found = _verdict(one, outcome, events=events, report=report)
            if (loss := losses.get(index)) is not None:
                found = replace(found, outcome=loss.outcome, detected_s=_between(one.time, loss.time), over_s=None)
            verdicts.append(found)
    return verdicts


def _injected(
    faults: Sequence[Fault],
    events: Sequence[Mapping[str, Any]],
    report: Mapping[str, Any],
    *,
    lost_after_s: float,
    engine_failed: bool,
) -> list[_Injected]:
    found: list[_Injected] = []
    for event in events:
        if event.get("event") == FAULT:
            fault, ranks = faults[event["index"]], frozenset(event["ranks"])
            is_named = _is_named(fault, ranks, report, engine_failed=engine_failed)
            found.append(
                _Injected(event["index"], fault, event["time"], ranks, event["step"], event["time"], is_named=is_named)
            )
    return [_with_effect(one, found, report, lost_after_s=lost_after_s) for one in found]


def _with_effect(
    one: _Injected, injected: Sequence[_Injected], report: Mapping[str, Any], *, lost_after_s: float
) -> _Injected:
    """Set the moment at which a fault breaks the run, which for some is later than its injection.

    A stopped rank counts as hung only after the timeout, and until it is continued, no signal but SIGKILL takes effect. A
    silent host counts as lost only when its lease is over.
    """
    if one.fault.verb is Verb.STOP:
        return replace(one, breaks_at=report["failure"]["time"] if one.is_named else math.inf)
    if _loses_host(one.fault):
        return replace(one, breaks_at=one.time if one.is_named else one.time + lost_after_s)
    if one.fault.verb in {Verb.TERM, Verb.SEGV} and one.ranks:
        return replace(one, breaks_at=min(_awake_at(rank, one.time, injected) for rank in one.ranks))
    return one


def _broke_before(first: _Injected, report: Mapping[str, Any]) -> bool:
    """Whether the run had failed before the fault. For a lost host, the report has only the time of the last sign of life."""
    failure = report["failure"]
    if failure is None or failure["time"] is None or failure["class"] == Cause.HOST_LOST:
        return False
    return bool(failure["time"] < first.time - _SAME_MOMENT_S)


def _awake_at(rank: int, time: float, injected: Sequence[_Injected]) -> float:
    """Return when a signal that is sent at `time` takes effect in a rank, which may be stopped; infinity if never."""
    changes = [one for one in injected if rank in one.ranks and one.fault.verb in {Verb.STOP, Verb.CONTINUE}]
    before = [one for one in changes if one.time <= time]
    if not before or before[-1].fault.verb is Verb.CONTINUE:
        return time
    return next((one.time for one in changes if one.time > time and one.fault.verb is Verb.CONTINUE), math.inf)


def _is_harmless(one: _Injected, injected: Sequence[_Injected]) -> bool:
    """Whether a fault should break nothing: it continues a rank, or stops one that is continued later."""
    if one.fault.verb is Verb.STOP:
        return all(math.isfinite(_awake_at(rank, one.time, injected)) for rank in one.ranks)
    return one.fault.verb in {Verb.CONTINUE, *ELASTIC}


def _loss_by(
    one: _Injected, injected: Sequence[_Injected], *, events: Sequence[Mapping[str, Any]], report: Mapping[str, Any]
) -> _Loss | None:
    """Return what became of the workers that a fault hit; None if it ended none, or if the run did not notice it or did not go on."""
    epochs = report.get("epochs")
    if not epochs or one.fault.verb in {Verb.CONTINUE, *ELASTIC}:
        return None
    lost = {event.get("worker"): event["time"] for event in events if event.get("event") == "worker_lost"}
    ended: dict[int, float] = {}
    is_overtaken = False
    for rank in _members_on(one, report) if _loses_host(one.fault) else one.ranks:
        time = lost.get(contract.worker_name(rank), -math.inf)
        if time < one.time - _SAME_MOMENT_S:  # it is still there, or an end of the fault was not noticed
            if one.fault.verb is not Verb.STOP or math.isinf(_awake_at(rank, one.time, injected)):
                return None
            continue
        match _part_in_loss(one, rank, injected, lost_at=time):
            case Outcome.REPLACED:
                ended[rank] = time
            case Outcome.OVERTAKEN:
                is_overtaken = True
    if not ended:
        return _Loss(Outcome.OVERTAKEN) if is_overtaken else None
    known = max(ended.values())
    has_gone_on = any(epoch["time"] >= known and ended.keys().isdisjoint(epoch["members"]) for epoch in epochs)
    return _Loss(Outcome.REPLACED, known) if has_gone_on or report["status"] == "done" else None


def _part_in_loss(one: _Injected, rank: int, injected: Sequence[_Injected], *, lost_at: float) -> Outcome:
    """Return what a fault has to do with the loss of a worker after it: `REPLACED` if it ended it, `ENDURED` or `OVERTAKEN` if it did not."""
    awake = _awake_at(rank, one.time, injected)
    if one.fault.verb in _ENDS_AWAKE:
        return Outcome.REPLACED if awake <= lost_at + _SAME_MOMENT_S else Outcome.OVERTAKEN
    if one.fault.verb is not Verb.STOP:
        return Outcome.REPLACED
    others = [
        moment
        for other in injected
        if other is not one and rank in other.ranks and other.time >= one.time
        if other.fault.verb is not Verb.STOP or other.time >= awake  # a process that is stopped cannot be stopped again
        if (moment := _takes_effect(other, rank, injected)) <= lost_at + _SAME_MOMENT_S
    ]
    if any(moment < awake for moment in others):
        return Outcome.OVERTAKEN
    # A worker that goes on only just before it is given up has not reported yet: then the stop has ended it all the same.
    is_over = awake < lost_at - _REPORTED_S or (others and awake <= lost_at)
    return Outcome.ENDURED if is_over else Outcome.REPLACED


def _takes_effect(one: _Injected, rank: int, injected: Sequence[_Injected]) -> float:
    """Return when a fault may begin to end a rank that it hits; infinity if it never does."""
    if one.fault.verb in {Verb.STOP, Verb.KILL}:
        return one.time
    return _awake_at(rank, one.time, injected) if one.fault.verb in _ENDS_AWAKE else math.inf


def _loses_host(fault: Fault) -> bool:
    return fault.verb is Verb.CUT or fault.target.kind is Kind.AGENT


def _members_on(one: _Injected, report: Mapping[str, Any]) -> frozenset[int]:
    """Return the members of an elastic run on the host that a fault takes from it, as they were at the fault."""
    before = [epoch["members"] for epoch in report["epochs"] if epoch["time"] <= one.time]
    here = {entry["rank"] for entry in report["ranks"] if entry["host"] == one.fault.target.value}
    return frozenset(here.intersection(*before[-1:]))


def _outcome(
    one: _Injected,
    first: _Injected | None,
    named: _Injected | None,
    *,
    breaking: Sequence[_Injected],
    report: Mapping[str, Any],
) -> Outcome:
    if one not in breaking:
        return Outcome.MISNAMED if not breaking and report["failure"] is not None else Outcome.ENDURED
    if one is named or (one.fault.target.kind is Kind.RUN and one.is_named):
        return Outcome.NAMED  # of several interrupts, each counts as named
    if named is None and one is first:
        return Outcome.UNNOTICED if report["status"] == "done" else Outcome.MISNAMED
    return Outcome.OVERTAKEN


def _is_named(fault: Fault, ranks: frozenset[int], report: Mapping[str, Any], *, engine_failed: bool) -> bool:
    """Whether the report says that this fault ended the run."""
    failure = report["failure"]
    kind, verb = fault.target.kind, fault.verb
    if fault.verb in ELASTIC:
        return False
    if kind is Kind.RUN:
        return bool(report["status"] == "interrupted" and failure is None)
    if kind is Kind.LAUNCHER:
        return bool(report["status"] == "terminated" and failure is None)
    if failure is None:
        return False
    if kind is Kind.ENGINE:
        return engine_failed
    if verb in FLIPS:  # without a majority, the report names all sides and blames no rank
        found = {Cause.DIFFERS, Cause.AUDITED}
        return bool(failure["class"] in found and (failure["rank"] is None or failure["rank"] in ranks))
    if kind is Kind.AGENT or verb is Verb.CUT:
        return bool(failure["class"] == Cause.HOST_LOST and failure["host"] == fault.target.value)
    causes = {Cause.SHIM_LOST} if kind is Kind.SHIM else _CAUSES.get(verb, set())
    return failure["class"] in causes and failure["rank"] in ranks


def _verdict(
    one: _Injected, outcome: Outcome, *, events: Sequence[Mapping[str, Any]], report: Mapping[str, Any]
) -> Verdict:
    start, end = _time_of(events, "start"), _time_of(events, "end")
    is_reported = outcome in {Outcome.NAMED, Outcome.MISNAMED}
    return Verdict(
        str(one.fault),
        outcome,
        ranks=tuple(sorted(one.ranks)),
        step=one.step,
        at_s=_between(start, one.time),
        detected_s=_between(one.time, _detected(one, events, report)) if is_reported else None,
        over_s=_between(one.time, end) if is_reported else None,
    )


def _detected(one: _Injected, events: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> float | None:
    """Return when the run detected a fault. For a lost host, this is the first reaction in the history, because the report has the last sign of life."""
    failure = report["failure"]
    if failure is not None and failure["class"] != Cause.HOST_LOST:
        time = failure["time"]
        return None if time is None else float(time)
    after = [
        event["time"]
        for event in events
        if event["event"] in {"host_silent", "host_lost", "signal", "ending", "killing", "end"}
        and event["time"] >= one.time
    ]
    return min(after, default=None)


def _time_of(events: Sequence[Mapping[str, Any]], kind: str) -> float | None:
    return next((event["time"] for event in events if event.get("event") == kind), None)


def _between(begin: float | None, end: float | None) -> float | None:
    """Return the seconds between two times, rounded to milliseconds as in the history; None if one is unknown."""
    return None if begin is None or end is None else round(max(0.0, end - begin), 3)
