"""The members of an elastic run on a virtual clock: who takes part in which epoch, and when.

The coordinator is that of a run (`ttlaunch/membership/coordinator.py`), and so is what a worker answers (`ttlaunch/membership/worker.py`):
they choose the members of each epoch, the sums that still count and the micro-batches that are computed anew. What takes time is given
by `Costs`, and what members do between two changes by a `Work`:

    virtual_steps.py    steps that all members make together, or of their own until they agree
    virtual_tasks.py    tasks that a server hands out to whoever asks
    virtual_leads.py    steps of which the fastest member may lead the slowest by some

A host that is cut off hears and says nothing more, but its workers still reach the others and go on with them, as after `cut` of
`ttlaunch chaos`: until the coordinator counts them as hung, or the host as lost.
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from statistics import median
from typing import Protocol

from ttlaunch.contract import worker_name
from ttlaunch.diagnostics.count import render_duration
from ttlaunch.lab.virtual_processes import Costs, Epoch, Process
from ttlaunch.membership import worker
from ttlaunch.membership.coordinator import step as decide
from ttlaunch.membership.coordinator_state import Coordinator, Phase
from ttlaunch.membership.messages import (
    Begin,
    Dismiss,
    Event,
    Follow,
    LeaveAsked,
    Lost,
    Member,
    Message,
    Prepare,
    Registered,
    Seat,
)
from ttlaunch.membership.pulse import SILENT_S, limit_for
from ttlaunch.membership.worker import WorkerState
from ttlaunch.planning.launch_plan import ElasticLimits
from ttlaunch.running.lost_hosts import RANK_WENT_WITH_HOST
from ttlaunch.running.membership.elastic_run import FUTILE
from ttlaunch.running.membership.membership import terms_of

_OVER = {Phase.FINISHED, Phase.STRANDED}


class Work(Protocol):
    """What the members of an epoch do; it says when steps are made, and changes what `WorkerState` says that members have."""

    def applied_at_start(self, number: int) -> int | None:
        """Return the last step in the weights of a worker that starts with the run; None if it gets its weights from another one."""

    def begin(self, begin: Begin, at_s: float) -> None:
        """Let members act in an epoch, which is the last one of `VirtualMembers.epochs`, from a time on that has not come yet."""

    def stop(self, number: int) -> float:
        """Let a worker stop for a change; returns when it has."""

    def go_on(self, number: int, since_s: float) -> None:
        """Let a process that was stopped since a time go on with what it did."""

    def follow(self, number: int, members: Sequence[int]) -> None:
        """Let a worker that comes get the state from members before it takes part."""

    def usual_s(self, number: int) -> float | None:
        """Return how long what a worker reports usually takes, where that is no step of the run."""


class VirtualMembers:
    """Workers, their coordinator and their clock.

    Attributes:
        now: The time.
        limits, total_steps, costs: As given.
        epochs: Those that have begun.
        newest: The order with which the newest of them has begun.
        processes: All that were started, by number.
        steps_done: The last step that was made.
        over_s: When the run ended, or when nothing more could happen; None before.
        waits: Whether it then waits without end for workers of hosts that are lost.
        away: The hosts that are lost, and when each was.
        on_step: Is called when a worker has reported a step.
    """

    def __init__(
        self,
        limits: ElasticLimits,
        *,
        hosts: Sequence[str],
        steps: int,
        costs: Costs,
        work: Callable[["VirtualMembers"], Work],
    ) -> None:
        """Start the first workers; their first step begins at time 0.

        Args:
            limits: How many workers may take part.
            hosts: The host of each worker that is started, or may be later, by number.
            steps: How many steps the run makes.
            costs: What takes time.
            work: Makes what members do in an epoch.
        """
        self.now, self.steps_done, self.waits = 0.0, 0, False
        self.away: dict[str, float] = {}
        self.over_s: float | None = None
        self.epochs: list[Epoch] = []
        self.newest: Begin | None = None
        self.processes: dict[int, Process] = {}
        self.on_step: Callable[[], None] = lambda: None
        self.limits, self.total_steps, self.costs = limits, steps, costs
        self._hosts = hosts
        self._follows = limits.kept_bytes > 0  # who comes gets the state before it takes part
        self.coordinator = Coordinator(terms_of(limits))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._reasons: list[str] = []
        self._step_times: list[float] = []
        self._last_s = 0.0  # when the last step was done
        self._heard_s = 0.0  # when the coordinator has last heard something
        self._cut: set[str] = set()  # hosts that hear and say nothing more
        self._futile: dict[int, int] = {}
        self._work = work(self)
        for number in range(limits.first):
            self._register_at_once(number)

    def at(self, time_s: float, deed: Callable[[], None]) -> None:
        """Do something at a time."""
        heappush(self._events, (time_s, next(self._order), deed))

    def run(self) -> None:
        """Go on until the run is over."""
        while self.over_s is None and self._events:
            self.now, _, deed = heappop(self._events)
            deed()
        if self.over_s is None:  # nothing is left that could happen
            self.over_s, self.waits = self._heard_s, bool(self.away)

    # What faults do

    def next_to_start(self) -> int | None:
        """Return the next worker that was never started; None if all were."""
        return next((number for number in range(len(self._hosts)) if number not in self.processes), None)

    def start(self, number: int) -> None:
        """Start a worker."""
        self.processes[number] = Process(WorkerState(Member(number, 0)), self._hosts[number], self.now)
        self.at(self.now + self.costs.start_s, lambda: self.register(number, None, follows=self._follows))

    def hears(self, number: int) -> bool:
        """Whether what the launcher does to a process reaches its host."""
        return self._hosts[number] not in self._cut

    def end(self, number: int, why: str) -> None:
        """End a process."""
        self._note_end(number, why)
        self.at(self.now + self.costs.notice_s, lambda: self._lose(number))

    def stop(self, number: int) -> None:
        """Stop a process; it is killed when it has made no progress for long, unless it is continued before."""
        process, now = self.processes[number], self.now
        if process.stopped_s is None:
            process.stopped_s = now
            self._kill_when_quiet(number, lambda: process.stopped_s == now)

    def let_go_on(self, number: int) -> None:
        """Continue a stopped process: it goes on with what it did, and does what it was ordered to do meanwhile."""
        process = self.processes[number]
        since, process.stopped_s = process.stopped_s, None
        if since is None or process.gone_s is not None:
            return
        self._work.go_on(number, since)
        while process.later and process.acts:
            process.later.popleft()()

    def cut(self, host: str, *, lease_s: float) -> None:
        """Cut a host off for good: it counts as lost when its lease is over, and its members as hung if that is sooner."""
        if host in self._cut:
            return
        self._cut.add(host)
        for number, process in self.processes.items():
            if process.host == host and number in self.coordinator.members:
                self._kill_when_quiet(number, lambda: True)
        self.at(self.now + lease_s, lambda: self._lose_host(host))

    def _kill_when_quiet(self, number: int, is_quiet: Callable[[], bool]) -> None:
        process = self.processes[number]
        usual_s = self._work.usual_s(number)
        if usual_s is None:
            usual_s = median(self._step_times[-64:]) if self._step_times else 0.0
        quiet_s = limit_for(usual_s)
        quiet_s = quiet_s if number in self.coordinator.members else max(quiet_s, SILENT_S)

        def kill() -> None:
            if process.gone_s is None and is_quiet():
                process.hung = f"made no progress for {render_duration(quiet_s)}"
                self._note_end(number, f"{process.hung} and was killed")
                self._lose(number)

        self.at(self.now + quiet_s, kill)

    def _lose_host(self, host: str) -> None:
        """Count all workers of a host as ended; none starts there any more."""
        self.away[host] = self.now
        for number, process in list(self.processes.items()):
            if process.host == host and process.lost_s is None and not process.has_left:
                if process.gone_s is None:
                    self._note_end(number, RANK_WENT_WITH_HOST)
                self._lose(number)

    def ask_to_leave(self, number: int) -> None:
        """Ask a worker that takes part to leave."""
        if number in self.coordinator.staying:
            self._reasons.append(f"{worker_name(number)} left")
            self._handle(LeaveAsked(number))

    # Processes

    def _register_at_once(self, number: int) -> None:
        applied = self._work.applied_at_start(number)
        state = WorkerState(Member(number, 0), applied=applied)
        self.processes[number] = Process(state, self._hosts[number], 0.0, ready_s=0.0)
        self._handle(Registered(self._seat(number), applied))

    def let(self, number: int, deed: Callable[[], None]) -> None:
        """Let a worker do something: one that is stopped when it is continued, one that has ended never."""
        process = self.processes[number]
        if process.acts:
            deed()
        elif process.gone_s is None:
            process.later.append(deed)

    def act_at(self, time_s: float, number: int, deed: Callable[[], None]) -> None:
        """Let a member of the newest epoch do something at a time, if the epoch lasts until then; else it is lost."""
        begin = self.newest

        def act() -> None:
            if self.processes[number].state.begin is begin is self.newest:
                deed()

        self.at(time_s, lambda: self.let(number, act))

    def register(self, number: int, applied: int | None, *, follows: bool) -> None:
        """Let a worker say that it is there: with the step in its weights, or with none and whether it gets them from members that go on."""
        self.let(number, lambda: self._register_now(number, applied, follows=follows))

    def _register_now(self, number: int, applied: int | None, *, follows: bool) -> None:
        process = self.processes[number]
        if self.coordinator.phase in _OVER or not self.hears(number):
            return
        if applied is not None or not follows:
            process.ready_s = self.now
        self._handle(Registered(self._seat(number), applied, follows=follows))

    def _seat(self, number: int) -> Seat:
        return Seat(Member(number, 0), self._hosts[number])

    def _note_end(self, number: int, why: str) -> None:
        process = self.processes[number]
        process.gone_s, process.why = self.now, why

    def _lose(self, number: int) -> None:
        """Tell the coordinator of an end, once, and start a worker in its place, unless its host is lost."""
        process, place = self.processes[number], number % self.limits.first
        if process.lost_s is not None:
            return
        process.lost_s = self.now
        has_taken_part = any(number in one.members and one.steps for one in self.epochs)
        self._futile[place] = 0 if has_taken_part else self._futile.get(place, 0) + 1
        self._reasons.append(f"{worker_name(number)} {process.why}")
        self._handle(Lost(Member(number, 0)))
        if self.coordinator.phase in _OVER:
            return
        rows = range(place, len(self._hosts), self.limits.first)
        free = [one for one in rows if one not in self.processes]
        if free and self._futile[place] < FUTILE and self._hosts[free[0]] not in self.away:
            self.start(free[0])
        there = [one for one in self.processes.values() if one.lost_s is None and not one.has_left]
        is_short = len(there) < self.limits.minimum and self.coordinator.phase is not Phase.RUNNING
        if is_short and not self.away:  # for a lost host, a run waits as long as it takes
            self.over_s = self.now

    # The coordinator

    def _handle(self, event: Event) -> None:
        before, self._heard_s = self.coordinator, self.now
        self.coordinator, orders = decide(before, event)
        latency_s = self.costs.latency_s if self.epochs else 0.0  # the clock begins with the first step
        for order in orders:
            for member in order.to:
                self._deliver(member.number, order.message, latency_s)
        begin = self.coordinator.begin
        if begin is not None and begin is not before.begin and self.coordinator.phase is Phase.RUNNING:
            self._begin(begin, self.now + latency_s)
        if self.coordinator.phase in _OVER and self.over_s is None:
            self.over_s = self.now

    def _deliver(self, number: int, message: Message, latency_s: float) -> None:
        if not isinstance(message, Begin):
            self.at(self.now + latency_s, lambda: self._take(number, message, latency_s))

    def _take(self, number: int, message: Message, latency_s: float) -> None:
        if self.hears(number):
            self.let(number, lambda: self._obey(number, message, latency_s))

    def _obey(self, number: int, message: Message, latency_s: float) -> None:
        process = self.processes[number]
        match message:
            case Prepare(epoch) if epoch > process.state.epoch:
                stopped_s = self._work.stop(number)
                process.state = worker.prepare(process.state, message)
                self.at(stopped_s + latency_s, partial(self.let, number, lambda: self._answer(number, epoch)))
            case Follow(seats=seats) if process.state.begin is None and not process.attempts:
                self._work.follow(number, [seat.member.number for seat in seats])
            case Dismiss():
                process.gone_s, process.has_left, process.why = self.now, True, "left"

    def _answer(self, number: int, epoch: int) -> None:
        process = self.processes[number]
        if process.state.epoch == epoch and self.hears(number):
            self._handle(worker.answer(process.state))

    def _begin(self, begin: Begin, at_s: float) -> None:
        before = self.epochs[-1].members if self.epochs else ()
        came = [one for one in begin.numbers if one not in before]
        reasons = [*self._reasons, *(f"{worker_name(one)} joined" for one in came)]
        self._reasons = []
        known = begin.epoch, begin.numbers, begin.applied, at_s, tuple(dict.fromkeys(reasons)), begin.blocks
        self.epochs.append(Epoch(*known))
        self._futile |= {number % self.limits.first: 0 for number in begin.numbers}
        self.newest = begin
        self._work.begin(begin, at_s)

    # What members report of their work

    def note_reported(self, number: int, step: int) -> None:
        """Note the last step of a member, unless it is cut off from the launcher."""
        if self.hears(number):
            self.processes[number].reported = step

    def end_run(self, number: int) -> None:
        """Let a member report that it has made the last step."""
        process = self.processes[number]
        process.state = worker.end_run(process.state)
        self.report(number)

    def note_step(self, step: int, *, usual_s: float | None) -> None:
        """Note that a step of the run is made now, which takes so long where no change comes in between; None if that is not known."""
        epoch = self.epochs[-1]
        if epoch.done_s is None:
            epoch.done_s, epoch.lost_s = self.now, None if usual_s is None else self.now - self._last_s - usual_s
        epoch.steps, self.steps_done = epoch.steps + 1, step
        self._step_times.append(self.now - self._last_s)
        self._last_s = self.now

    def report(self, number: int) -> None:
        """Let a member tell the coordinator how far it is."""
        process = self.processes[number]
        if process.acts and self.hears(number):
            self._handle(worker.progress(process.state, pace_s=None))
