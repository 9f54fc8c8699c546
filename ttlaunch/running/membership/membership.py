"""The members of an elastic run: the coordinator's state machine at work, with its clock, its journal and its orders."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ttlaunch.contract import worker_name
from ttlaunch.diagnostics.count import counted
from ttlaunch.membership.coordinator import step
from ttlaunch.membership.coordinator_state import Coordinator, Phase, Terms, Worker
from ttlaunch.membership.messages import (
    Begin,
    CutOff,
    Dismiss,
    EndOrdered,
    Event,
    Finish,
    LeaveAsked,
    Lost,
    Member,
    Order,
    Registered,
    Tick,
    orders_to_json,
)
from ttlaunch.membership.pulse import Pulse
from ttlaunch.membership.reports import beat_of, event_of
from ttlaunch.planning.launch_plan import ElasticLimits
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.members import MemberReport
from ttlaunch.running.membership.journal import Journal
from ttlaunch.running.membership.members import NotAdmittedError

FASTER = "some members are faster than others"
"""The reason of an epoch that only divides the work anew."""

_TAKEN_TOGETHER = {"answered", "progressed"}  # by one transition, if some come in a row
_TICK_S = 0.5
_LEAST_S = (
    3.0  # an epoch lasts at least so long before a member may ask for another one: workers of strangers take part, too
)


@dataclass
class Change:
    """A change of the members, and what it cost.

    Attributes:
        epoch: The epoch that began with it.
        members: The numbers of its members, sorted.
        step: The step after which it began.
        reasons: What led to it, such as "worker-0002 was lost".
        computed_anew: How many leaves of the interrupted step had to be computed again.
        lost_steps: How many steps went with workers that take part no more, because no average was made since.
        time: When the epoch began, seconds since the epoch.
        blocks: The micro-batches of each member: the first, and one past the last.
        pause_s: Seconds from the first reason to the first step of the epoch; None while none is done.
    """

    epoch: int
    members: tuple[int, ...]
    step: int
    reasons: tuple[str, ...]
    computed_anew: int
    lost_steps: int
    time: float
    blocks: tuple[tuple[int, int], ...] = ()
    pause_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the change as the journal and the report have it."""
        blocks = [list(block) for block in self.blocks]
        return {**vars(self), "members": list(self.members), "reasons": list(self.reasons), "blocks": blocks}


class Membership:
    """The members of an elastic run, and the orders that they get. Any thread may call any method.

    Attributes:
        changes: The epochs that have begun.
        left: Why each worker that is gone has left, by number.
        lost: Those of them that were lost, in the order in which that was noticed, each with whether it had the weights, or its part
            of them.
    """

    def __init__(
        self,
        limits: ElasticLimits,
        journal: Journal,
        *,
        tell: Callable[[Member, bytes], None],
        hang_s: float | None = None,
    ) -> None:
        """Wait for the workers that start with the run.

        Args:
            limits: How many workers may take part.
            journal: Gets every change before any worker is ordered to follow it.
            tell: Passes an order on to a worker; orders may be lost.
            hang_s: After how many seconds without progress a worker counts as hung; None: that follows from the steps.
        """
        self.changes: list[Change] = []
        self.left: dict[int, str] = {}
        self.lost: dict[int, bool] = {}
        self._state = Coordinator(terms_of(limits))
        self._journal, self._tell = journal, tell
        self._pulse = Pulse(hang_s=hang_s)
        self._reasons: list[str] = []  # for the next epoch
        self._disturbed: float | None = None  # since when no step has been made because of them
        self._reports: dict[int, MemberReport] = {}
        self._applied: dict[int, tuple[int, float]] = {}  # by number: the newest step, and when it was reported
        self._has_lost = False  # a worker, since the run was ordered to stop
        self._came: set[int] = set()  # workers that have made no step since they joined
        self._ticked = 0.0
        self._began = 0.0  # the newest epoch
        self._lock = threading.RLock()

    @property
    def state(self) -> Coordinator:
        """What the coordinator knows; it never changes."""
        return self._state

    @property
    def phase(self) -> Phase:
        """What the coordinator does."""
        return self._state.phase

    @property
    def is_frozen(self) -> bool:
        """Whether nobody may join any more, since the journal cannot be written."""
        return self._journal.error is not None

    def newest(self, number: int) -> MemberReport | None:
        """Return what a worker has last reported."""
        return self._reports.get(number)

    def take(self, reports: Iterable[tuple[int, MemberReport]], now: float) -> None:
        """Take what workers have reported since the last look, each with its number, in the order in which it came.

        `now` is the time of this process's monotonic clock, in seconds.
        """
        with self._lock:
            for what, alike in groupby(reports, lambda pair: pair[1].what):
                if what in _TAKEN_TOGETHER:
                    noted = [event for number, report in alike for event in self._noted(number, report, now)]
                    self._handle(now, *noted)
                    continue
                for number, report in alike:  # what one of them changes decides what is noted of the next
                    self._handle(now, *self._noted(number, report, now))

    def _noted(self, number: int, report: MemberReport, now: float) -> list[Event]:
        """Note what a worker has reported; returns the event that the coordinator is to take, or none if nothing follows from it."""
        event = event_of(number, report)
        if event is None or (isinstance(event, Registered) and self.is_frozen and number not in self._state.workers):
            return []
        if report.incarnation < self._state.seen.get(number, 0):
            return [event]  # from which it learns that another process has taken its place
        self._reports[number] = report
        self._pulse.note(number, beat_of(report), now)
        if isinstance(event, Registered) and number not in self._state.workers:
            self._journal.write("registered", worker=number, incarnation=report.incarnation, applied=event.applied)
        if isinstance(event, Registered) and self._is_ready_now(number, event):
            self._add_reason(f"{worker_name(number)} joined", now)
        if isinstance(event, CutOff):
            if event.epoch != self._state.epoch or self.phase is not Phase.RUNNING or now - self._began < _LEAST_S:
                return []
            self._add_reason(f"{worker_name(number)} lost its connection to another worker", now)
        self._note_step(number, report, now)
        return [event]

    def lose(self, number: int, reason: str, now: float) -> None:
        """Note that a worker's process has ended, or is treated so; `reason` is a clause such as "was killed by SIGKILL"."""
        with self._lock:
            known = self._state.workers.get(number)
            member = known.seat.member if known else Member(number, self._state.seen.get(number, 0))
            self.left.setdefault(number, reason)
            self.lost.setdefault(number, known is not None and self._has_weights(number, known))
            self._has_lost = True
            self._journal.write("lost", worker=number, incarnation=member.incarnation, reason=reason)
            self._add_reason(f"{worker_name(number)} {reason}", now)
            self._handle(now, Lost(member))
            self._pulse.forget(number)

    def note_end(self, number: int, now: float) -> None:
        """Note that a worker has ended as it was ordered to, because the run is being ended."""
        with self._lock:
            known = self._state.workers.get(number)
            self.left.setdefault(number, "ended with the run")
            self._journal.write("ended", worker=number)
            if known is not None:
                self._handle(now, Lost(known.seat.member))
                self._pulse.forget(number)

    def let_come_again(self, number: int, now: float) -> None:
        """Forget why a worker has left, because a newer process has its number; an older one that still takes part is lost."""
        with self._lock:
            if number in self._state.workers:
                self.lose(number, "was replaced by a newer process of the same worker", now)
            self.left.pop(number, None)
            self.lost.pop(number, None)

    def let_leave(self, number: int, now: float) -> None:
        """Let a worker leave at the next boundary of a step; one that leaves already, or does not take part, is left as it is.

        Raises:
            NotAdmittedError: The others could not go on without it.
        """
        with self._lock:
            if number in self._state.staying:
                check_can_leave(self._state, number)
                self._leave(number, now)

    def let_go(self, number: int, now: float) -> None:
        """Let a worker leave at the next boundary of a step because the run was ordered to stop; ask for each once."""
        with self._lock:
            self._leave(number, now)

    def _leave(self, number: int, now: float) -> None:
        self.left.setdefault(number, "left")
        self._journal.write("leaves", worker=number)
        self._add_reason(f"{worker_name(number)} left", now)
        self._handle(now, LeaveAsked(number))

    def let_end(self, now: float) -> None:
        """Note that the run was ordered to stop, so that nobody comes any more."""
        with self._lock:
            self._has_lost = False
            self._handle(now, EndOrdered())

    def tick(self, now: float) -> None:
        """Repeat orders that may have been lost; call it a few times a second."""
        with self._lock:
            if now - self._ticked >= _TICK_S:
                self._ticked = now
                self._handle(now, Tick())

    def excuse(self, seconds: float, now: float) -> None:
        """Count the last so many seconds for no member, because nobody has watched them meanwhile."""
        with self._lock:
            self._pulse.excuse(seconds, now)

    def late(self, now: float) -> Mapping[int, float]:
        """Return the members that hold the run up, each with the seconds since its last progress."""
        with self._lock:
            return self._pulse.late(now) if self._state.phase in {Phase.COLLECTING, Phase.RUNNING} else {}

    def _has_weights(self, number: int, known: Worker) -> bool:
        """Whether a worker has weights: it has said so when it was last asked, or has made a step with them since."""
        report = self._reports.get(number)
        return known.applied is not None or (
            report is not None and report.what == "progressed" and bool(report.applied)
        )

    def _is_ready_now(self, number: int, event: Registered) -> bool:
        """Whether a worker can take part from now on; until then, one that follows the others disturbs nobody."""
        known = self._state.workers.get(number)
        had_none = known is None or (known.lacks_state and number not in self._state.members)
        return had_none and (event.applied is not None or not event.follows)

    def _add_reason(self, reason: str, now: float) -> None:
        self._reasons.append(reason)
        self._disturbed = now if self._disturbed is None else self._disturbed

    def _handle(self, now: float, *events: Event) -> None:
        before = self._state
        self._state, orders = step(before, *events)
        if (
            self._state.phase is Phase.RUNNING
            and self._state.begin is not before.begin
            and self._state.begin is not None
        ):
            self._begin(self._state.begin, now)
        elif self._state.phase is not before.phase and self._state.phase in {Phase.FINISHED, Phase.STRANDED}:
            # Where all have ended as they were ordered to, nobody is left who could go on, but nothing is lost either.
            is_stranded = self._state.phase is Phase.STRANDED
            is_ordered = is_stranded and self._state.is_ending and not self._has_lost
            self._journal.write("stopped" if is_ordered else str(self._state.phase))
        elif self._state.epoch != before.epoch:
            self._pulse.restart(self._state.members, now)
        for order in orders:
            if isinstance(order.message, Dismiss):
                for member in order.to:
                    self.left.setdefault(member.number, "left")
        self._send(orders)

    def _begin(self, begin: Begin, now: float) -> None:
        self._began = now
        # A server without slots hands out whole steps, and counts those that it hands out again.
        has_tasks = self._state.terms.servers > 0 and self._state.terms.slots is None
        anew = 0 if has_tasks or not self.changes else sum(last - first for rows in begin.todo for first, last in rows)
        before = frozenset(self.changes[-1].members if self.changes else begin.numbers)
        came = [number for number in begin.numbers if number not in before]
        self._came = {*self._came, *came} & {*begin.numbers}
        late = [f"{worker_name(number)} joined" for number in came]  # had it waited, too few would have made steps
        self._reasons += [reason for reason in late if reason not in self._reasons]
        reasons = tuple(self._reasons) or (FASTER,)
        reasons, self._reasons = reasons if self.changes else (), []
        self._disturbed = self._disturbed if self.changes else now
        lost_steps = sum(self._reports[number].own_steps for number in before.difference(begin.numbers))
        change = Change(begin.epoch, begin.numbers, begin.applied, reasons, anew, lost_steps, time.time(), begin.blocks)
        self.changes.append(change)
        joined = [number for number, applied in begin.behind if applied is None]
        known = {k: v for k, v in change.as_json().items() if k not in {"time", "pause_s", "blocks"}}
        self._journal.write("epoch", **known, joined=joined)
        self._pulse.restart(begin.numbers, now)

    def _note_step(self, number: int, report: MemberReport, now: float) -> None:
        """Measure steps, and the pause of a change, by the first member that reports each."""
        begin = self._state.begin
        if report.what != "progressed" or report.applied is None or begin is None or report.epoch != begin.epoch:
            return
        known = self._applied.get(number)
        if known is None or known[0] < report.applied:
            if known is not None and known[0] + 1 == report.applied:
                self._pulse.note_step(now - known[1])
            self._applied[number] = (report.applied, now)
        change = self.changes[-1]
        if number in self._came and report.applied > change.step:
            self._came.discard(number)
            states, means = (*report.taken, 0, 0)[:2]
            given = {str(giver): size for giver, size in report.given}
            self._journal.write("given", worker=number, bytes=given, states=states, means=means)
        if change.pause_s is None and report.applied > change.step:
            change.pause_s = round(now - (now if self._disturbed is None else self._disturbed), 3)
            self._disturbed = None
            self._journal.write("resumed", epoch=change.epoch, step=report.applied, pause_s=change.pause_s)

    def _send(self, orders: Sequence[Order]) -> None:
        for member, text in orders_to_json(orders):
            self._tell(member, text.encode())
        if any(isinstance(order.message, Finish) for order in orders):
            self._pulse.restart((), 0.0)


def terms_of(limits: ElasticLimits) -> Terms:
    """Return what the coordinator of a run with these limits goes by."""
    return Terms(
        limits.minimum,
        limits.maximum,
        limits.micro_batches,
        frozenset(range(limits.first)),
        slots=limits.slots,
        servers=limits.servers,
        has_local_steps=limits.has_local_steps,
    )


def check_can_leave(state: Coordinator, number: int) -> None:
    """Refuse that a worker leaves without which the others could not go on.

    Raises:
        NotAdmittedError: They could not.
    """
    terms, others = state.terms, len(state.staying) - 1
    if others < terms.minimum:
        left = f"{others} {'is' if others == 1 else 'are'} left"
        raise NotAdmittedError(
            f"{worker_name(number)} cannot leave: a step needs {counted(terms.minimum, 'worker')}, and without it {left}"
        )
    has_alone = terms.servers > 0 and terms.slots is None
    if has_alone and number in state.places[: terms.servers]:
        raise NotAdmittedError(f"{worker_name(number)} cannot leave: it is the server, which alone has the weights")
