"""The members of an elastic run on a virtual clock: who takes part in which step, and when.

The coordinator is that of a run (`ttlaunch/membership/coordinator.py`), and so is what a worker answers (`ttlaunch/membership/worker.py`):
they choose the members of each epoch, the sums that still count and the micro-batches that are computed anew. What takes time is given
by `Costs`, and what workers get from one another by `lab/virtual_gifts.py`.

    kill      ... step 6 |#kill ~~~ noticed ~ all have answered | what nobody has any more | exchange | step 8 ...
    join      ... step 6 | step 7 | step 8 |       the joiner starts, gets the state after step 7 and the mean gradient of step 8,
                                     step 9 # all have answered | the rest of step 9, with the joiner | step 10 ...

A step is the plain one of as many workers: each computes its micro-batches, then they exchange and update. In the first step of an epoch
they compute what the coordinator has divided, and the rest of the step takes as long as ever.

A host that is cut off hears and says nothing more, but its workers still reach the others and make steps with them, as after `cut` of
`ttlaunch chaos`: until the coordinator counts them as hung, or the host as lost.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from statistics import median

from ttlaunch.contract import worker_name
from ttlaunch.diagnostics.count import render_duration
from ttlaunch.lab.virtual_gifts import equal_parts, gifts_at, has_slots
from ttlaunch.lab.virtual_processes import Costs, Epoch, Making, Process, count_leaves, nodes_of
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
from ttlaunch.membership.numbered import changed
from ttlaunch.membership.pulse import SILENT_S, limit_for
from ttlaunch.membership.worker import Leaves, WorkerState
from ttlaunch.planning.launch_plan import ElasticLimits
from ttlaunch.running.lost_hosts import RANK_WENT_WITH_HOST
from ttlaunch.running.membership.elastic_run import FUTILE
from ttlaunch.running.membership.membership import terms_of

_OVER = {Phase.FINISHED, Phase.STRANDED}
_ATTEMPTS = 5  # to get a state that is not too old, as in a run


class VirtualMembers:
    """Workers, their coordinator and their clock.

    Attributes:
        now: The time.
        epochs: Those that have begun.
        processes: All that were started, by number.
        steps_done: The last step that was made.
        over_s: When the run ended, or when nothing more could happen; None before.
        waits: Whether it then waits without end for workers of hosts that are lost.
        away: The hosts that are lost, and when each was.
    """

    def __init__(self, limits: ElasticLimits, *, hosts: Sequence[str], steps: int, costs: Costs) -> None:
        """Start the first workers; their first step begins at time 0.

        Args:
            limits: How many workers may take part.
            hosts: The host of each worker that is started, or may be later, by number.
            steps: How many steps the run makes.
            costs: What takes time.
        """
        self.now, self.steps_done, self.waits = 0.0, 0, False
        self.away: dict[str, float] = {}
        self.over_s: float | None = None
        self.epochs: list[Epoch] = []
        self.processes: dict[int, Process] = {}
        self.on_step: Callable[[], None] = lambda: None
        self._limits, self._hosts, self._steps, self._costs = limits, hosts, steps, costs
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
        self._after_step: list[tuple[int, Callable[[], None]]] = []
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
        self.at(self.now + self._costs.start_s, lambda: self._register(number, None, follows=self._follows))

    def hears(self, number: int) -> bool:
        """Whether what the launcher does to a process reaches its host."""
        return self._hosts[number] not in self._cut

    def end(self, number: int, why: str) -> None:
        """End a process."""
        self._note_end(number, why)
        self.at(self.now + self._costs.notice_s, lambda: self._lose(number))

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
        making = process.making
        if making is not None and not (making.is_done or making.is_stopped):
            began_s = making.starts[number]
            first, stop = making.begin.blocks[making.members.index(number)]
            missed_s = process.missed * (stop - first) * self._costs.leaf_s(number)
            making.starts[number] = missed_s + (self.now if began_s >= since else began_s + self.now - since)
            self._plan_end(making)
        for _ in range(process.missed):
            process.state = worker.end_step(worker.apply(process.state))
        process.missed = 0
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
        quiet_s = limit_for(median(self._step_times[-64:]) if self._step_times else 0.0)
        quiet_s = quiet_s if number in self.coordinator.members else max(quiet_s, SILENT_S)

        def kill() -> None:
            if process.gone_s is None and is_quiet():
                self._note_end(number, f"made no progress for {render_duration(quiet_s)} and was killed")
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
        self.processes[number] = Process(
            WorkerState(Member(number, 0), applied=0), self._hosts[number], 0.0, ready_s=0.0
        )
        self._handle(Registered(self._seat(number), 0))

    def _let(self, number: int, deed: Callable[[], None]) -> None:
        """Let a worker do something: one that is stopped when it is continued, one that has ended never."""
        process = self.processes[number]
        if process.acts:
            deed()
        elif process.gone_s is None:
            process.later.append(deed)

    def _register(self, number: int, applied: int | None, *, follows: bool) -> None:
        self._let(number, lambda: self._register_now(number, applied, follows=follows))

    def _register_now(self, number: int, applied: int | None, *, follows: bool) -> None:
        process = self.processes[number]
        if self.coordinator.phase in _OVER or not self.hears(number):
            return
        if applied is not None or not follows:
            process.ready_s = self.now
            self._reasons.append(f"{worker_name(number)} joined")
        self._handle(Registered(self._seat(number), applied, follows=follows))

    def _seat(self, number: int) -> Seat:
        return Seat(Member(number, 0), self._hosts[number])

    def _note_end(self, number: int, why: str) -> None:
        process = self.processes[number]
        process.gone_s, process.why = self.now, why

    def _lose(self, number: int) -> None:
        """Tell the coordinator of an end, once, and start a worker in its place, unless its host is lost."""
        process, place = self.processes[number], number % self._limits.first
        if process.lost_s is not None:
            return
        process.lost_s = self.now
        has_taken_part = any(number in one.members and one.steps for one in self.epochs)
        self._futile[place] = 0 if has_taken_part else self._futile.get(place, 0) + 1
        self._reasons.append(f"{worker_name(number)} {process.why}")
        self._handle(Lost(Member(number, 0)))
        if self.coordinator.phase in _OVER:
            return
        rows = range(place, len(self._hosts), self._limits.first)
        free = [one for one in rows if one not in self.processes]
        if free and self._futile[place] < FUTILE and self._hosts[free[0]] not in self.away:
            self.start(free[0])
        there = [one for one in self.processes.values() if one.lost_s is None and not one.has_left]
        is_short = len(there) < self._limits.minimum and self.coordinator.phase is not Phase.RUNNING
        if is_short and not self.away:  # for a lost host, a run waits as long as it takes
            self.over_s = self.now

    # The coordinator

    def _handle(self, event: Event) -> None:
        before, self._heard_s = self.coordinator, self.now
        self.coordinator, orders = decide(before, event)
        latency_s = self._costs.latency_s if self.epochs else 0.0  # the clock begins with the first step
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
            self._let(number, lambda: self._obey(number, message, latency_s))

    def _obey(self, number: int, message: Message, latency_s: float) -> None:
        process = self.processes[number]
        match message:
            case Prepare(epoch) if epoch > process.state.epoch:
                stopped_s = self._stop_step(number)
                process.state = worker.prepare(process.state, message)
                self.at(stopped_s + latency_s, partial(self._let, number, lambda: self._answer(number, epoch)))
            case Follow(seats=seats) if process.state.begin is None and not process.attempts:
                self._follow(number, [seat.member.number for seat in seats])
            case Dismiss():
                process.gone_s, process.has_left, process.why = self.now, True, "left"

    def _answer(self, number: int, epoch: int) -> None:
        process = self.processes[number]
        if process.state.epoch == epoch and self.hears(number):
            self._handle(worker.answer(process.state))

    # Steps

    def _begin(self, begin: Begin, at_s: float) -> None:
        anew = sum(stop - first for rows in begin.todo for first, stop in rows) if self.epochs else 0
        came = [one for one in begin.numbers if self.epochs and one not in self.epochs[-1].members]
        reasons = [*self._reasons, *(f"{worker_name(one)} joined" for one in came)]
        self._reasons = []
        known = begin.epoch, begin.numbers, begin.applied, at_s, tuple(dict.fromkeys(reasons)), anew, begin.blocks
        todo, kept = (dict(zip(begin.numbers, rows, strict=True)) for rows in (begin.todo, begin.kept))
        if (
            self._limits.has_local_steps and not self.epochs
        ):  # later, members have made the step that they were asked to end
            todo = {number: (block,) for number, block in zip(begin.numbers, begin.blocks, strict=True)}
        self.epochs.append(Epoch(*known, lost_steps=self._count_lost(begin)))
        self._futile |= {number % self._limits.first: 0 for number in begin.numbers}
        starts = self._give(begin, at_s)
        for number in begin.numbers:
            process = self.processes[number]
            process.state = worker.begin(process.state, begin)
            if self._limits.slots is not None and has_slots(self._limits):
                process.state = worker.with_slots(process.state, begin, slots=self._limits.slots)
            elif process.state.applied != begin.applied:
                process.state = worker.catch_up(process.state)
        if begin.applied >= self._steps:
            self.at(max(starts.values()), lambda: self._report(begin, begin.applied))
            return
        making = Making(begin.applied + 1, begin, starts, todo, kept)
        if all(map(self.hears, begin.numbers)):  # one that is cut off never hears of the epoch
            self._make(making)

    def _count_lost(self, begin: Begin) -> int:
        """Return how many steps of their own, since they last agreed, go with members that take part no more."""
        gone = set(self.epochs[-1].members).difference(begin.numbers) if self.epochs else set()
        return sum(self.processes[number].reported % self._costs.every for number in gone)

    def _step_s(self, making: Making) -> float:
        return self._costs.step_s(making.members, agrees=self._agrees(making))

    def _agrees(self, making: Making) -> bool:
        return making.step % self._costs.every == 0 or making.step == self._steps

    def _give(self, begin: Begin, at_s: float) -> dict[int, float]:
        """Let members get what they lack; returns when each has it."""
        starts = dict.fromkeys(begin.numbers, at_s)
        states = {number: self.processes[number].state for number in begin.numbers}
        gifts = gifts_at(begin, states, limits=self._limits, costs=self._costs)
        times = self._costs.transfers_s({number: one.sizes for number, one in gifts.items()})
        for number, gift in gifts.items():
            process = self.processes[number]
            self._count(process, round(sum(gift.sizes.values())), is_mean=gift.is_mean)
            process.ready_s = self.now if process.ready_s is None else process.ready_s
            starts[number] += times[number]
        return starts

    def _make(self, making: Making) -> None:
        """Let the members make a step."""
        for number in making.members:
            self.processes[number].making = making
        longest_s = max(
            (stop - first) * self._costs.leaf_s(one)
            for one, (first, stop) in zip(making.members, making.begin.blocks, strict=True)
        )
        making.exchange_s = self._step_s(making) - longest_s
        self._plan_end(making)

    def _plan_end(self, making: Making) -> None:
        """Let a step end when all have computed their micro-batches, and exchanged the sums."""
        making.tries += 1
        tries = making.tries
        computed_s = max(
            making.starts[one] + count_leaves(making.todo[one]) * self._costs.leaf_s(one) for one in making.members
        )
        self.at(max(self.now, computed_s + making.exchange_s), lambda: self._end_step(making, tries))

    def _end_step(self, making: Making, tries: int) -> None:
        absent = [number for number in making.members if not self.processes[number].acts]
        is_missing = making.is_stopped or (absent and not self._is_made_alone(making, absent))
        if is_missing or tries != making.tries:
            return  # some of it is missing, or it ends later
        making.is_done, begin = True, making.begin
        epoch, step_s = self.epochs[-1], self._step_s(making)
        if epoch.done_s is None:
            epoch.done_s, epoch.lost_s = self.now, self.now - self._last_s - step_s
        epoch.steps, self.steps_done = epoch.steps + 1, making.step
        self._step_times.append(self.now - self._last_s)
        self._last_s = self.now
        for number in making.members:
            process = self.processes[number]
            if number in absent:
                process.missed += 1
                continue
            process.state = worker.end_step(worker.apply(process.state))
            process.reported = making.step if self.hears(number) else process.reported
        blocks = {number: (block,) for number, block in zip(begin.numbers, begin.blocks, strict=True)}
        nothing: Mapping[int, Sequence[Leaves]] = dict.fromkeys(begin.numbers, ())
        if making.step < self._steps:
            starts = dict.fromkeys(begin.numbers, self.now)
            self._make(Making(making.step + 1, begin, starts, blocks, nothing))
        for step, deed in [one for one in self._after_step if one[0] <= making.step]:
            self._after_step.remove((step, deed))
            deed()
        self.on_step()  # before the last report: a worker that ends then has not done what follows the last step
        self._report(begin, making.step)

    def _is_made_alone(self, making: Making, absent: Sequence[int]) -> bool:
        """Whether members make a step without some of them: one of their own, after which they do not agree."""
        return self._limits.has_local_steps and not self._agrees(making) and len(absent) < len(making.members)

    def _report(self, begin: Begin, step: int) -> None:
        for number in begin.numbers:
            process = self.processes[number]
            if step >= self._steps and process.state.begin is begin:
                process.state = worker.end_run(process.state)
            if process.acts and self.hears(number):
                self._handle(worker.progress(process.state, pace_s=None))

    def _stop_step(self, number: int) -> float:
        """Let a member stop after the micro-batch that it computes; returns when, and notes the sums that it has then."""
        process = self.processes[number]
        making, process.making = process.making, None
        if making is None or making.is_done:
            return self.now
        making.is_stopped = True
        leaf_s, start_s = self._costs.leaf_s(number), making.starts[number]
        todo = [leaf for first, stop in making.todo[number] for leaf in range(first, stop)]
        done = min(len(todo), max(0, math.ceil((self.now - start_s) / leaf_s - 1e-9)))
        if self._limits.has_local_steps:  # nobody throws away a step of its own
            return max(self.now, start_s + len(todo) * leaf_s)
        has = {leaf for first, stop in making.kept[number] for leaf in range(first, stop)} | set(todo[:done])
        # Where all own slots, layers give their gradients away at once, and no sums of a whole step are kept.
        keeps = not (has_slots(self._limits) and self._limits.slots == 0)
        process.state = worker.hold(process.state, tuple(nodes_of(has)) if keeps else ())
        return max(self.now, start_s + done * leaf_s) if done else self.now

    # Workers that come

    def _follow(self, number: int, members: Sequence[int]) -> None:
        """Get the state after the step that is being made, and then what is missing."""
        process = self.processes[number]
        process.attempts += 1
        step = min(self._steps, self.steps_done + 1)

        def ask() -> None:
            parts = equal_parts(self._costs.state_bytes, members)
            taken_s = self._costs.transfers_s({number: parts})[number] + self._costs.leaf_s(number)
            self.at(self.now + taken_s, lambda: self._let(number, take))

        def take() -> None:
            if process.state.epoch == 0:
                self._count(process, self._costs.state_bytes, is_mean=False)
                process.state = changed(process.state, applied=step)
                self._catch_up(number, members)

        self._after_step.append((step, ask))

    def _catch_up(self, number: int, members: Sequence[int]) -> None:
        """Apply the mean gradients of the steps that others have made meanwhile; then say that this worker can take part."""
        process = self.processes[number]
        applied = process.state.applied
        if applied is None or process.state.epoch:
            return
        if self.steps_done - applied > self._costs.most_means:
            process.state = changed(process.state, applied=None)
            if process.attempts < _ATTEMPTS:
                self._follow(number, members)
            else:
                self._register(number, None, follows=False)
        elif self.steps_done > applied:
            self._count(process, self._costs.mean_bytes, is_mean=True)
            process.state = changed(process.state, applied=applied + 1)
            taken_s = self._costs.transfers_s({number: equal_parts(self._costs.mean_bytes, members)})[number]
            self.at(self.now + taken_s, partial(self._let, number, lambda: self._catch_up(number, members)))
        else:
            self._register(number, applied, follows=True)

    def _count(self, process: Process, size: int, *, is_mean: bool) -> None:
        process.taken[is_mean] += 1
        process.got += size
