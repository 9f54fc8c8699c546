"""The members of an elastic run on a virtual clock: who takes part in which step, and when.

The coordinator is that of a run (`ttlaunch/membership/coordinator.py`), and so is what a worker answers (`ttlaunch/membership/worker.py`):
they choose the members of each epoch, the sums that still count and the micro-batches that are computed anew. What takes time is given
by `Costs`.

    kill      ... step 6 |#kill ~~~ noticed ~ all have answered | what nobody has any more | exchange | step 8 ...
    join      ... step 6 | step 7 | step 8 |       the joiner starts, gets the state after step 7 and the mean gradient of step 8,
                                     step 9 # all have answered | the rest of step 9, with the joiner | step 10 ...

A step is the plain one of as many workers: each computes its micro-batches, then they exchange and update. In the first step of an epoch
they compute what the coordinator has divided, and the rest of the step takes as long as ever.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from statistics import median
from typing import Protocol

from ttlaunch.contract import worker_name
from ttlaunch.membership import worker
from ttlaunch.membership.coordinator import step as decide
from ttlaunch.membership.coordinator_state import Coordinator, Phase, Terms
from ttlaunch.membership.messages import (
    Begin,
    Dismiss,
    Event,
    Follow,
    LeaveAsked,
    Lost,
    Member,
    Order,
    Prepare,
    Registered,
    Seat,
)
from ttlaunch.membership.numbered import changed
from ttlaunch.membership.pulse import SILENT_S, limit_for
from ttlaunch.membership.worker import Leaves, WorkerState
from ttlaunch.planning.launch_plan import ElasticLimits
from ttlaunch.running.membership.elastic_run import FUTILE
from ttlaunch.spec.recipe.blocks import aligned_subtrees

_OVER = {Phase.FINISHED, Phase.STRANDED}
_ATTEMPTS = 5  # to get a state that is not too old, as in a run


class Costs(Protocol):
    """What takes time, in seconds.

    Attributes:
        start_s: A worker, from its start until it registers.
        notice_s: The end of a process, until the coordinator knows of it.
        latency_s: A message between the coordinator and a worker.
        most_means: So many mean gradients do members keep for a worker that follows.
    """

    start_s: float
    notice_s: float
    latency_s: float
    most_means: int

    def step_s(self, members: Sequence[int]) -> float:
        """Return the time of a whole step of these workers."""

    def leaf_s(self, number: int) -> float:
        """Return the time that a worker computes for one micro-batch."""

    def state_s(self, number: int, members: Sequence[int]) -> float:
        """Return how long a worker gets the state from these members, an equal part from each."""

    def mean_s(self, number: int, members: Sequence[int]) -> float:
        """Return the same for one mean gradient."""


@dataclass
class Epoch:
    """An epoch, and what the change that led to it has cost; times in seconds after the begin of the first step.

    Attributes:
        members: The numbers of the workers.
        step: The step after which it began.
        at_s: When it began.
        reasons: Why.
        computed_anew: How many micro-batches of the interrupted step had to be computed again.
        steps: How many steps were made in it.
        done_s: When its first step was done; None if none was.
        lost_s: How much later that was than with one step of the new members right after the last step before; None if none was made.
        blocks: The micro-batches of each member in all steps but the first.
    """

    epoch: int
    members: tuple[int, ...]
    step: int
    at_s: float
    reasons: tuple[str, ...]
    computed_anew: int
    blocks: tuple[Leaves, ...]
    steps: int = 0
    done_s: float | None = None
    lost_s: float | None = None


@dataclass
class Process:
    """The process of a worker.

    Attributes:
        started_s: When it was started.
        ready_s: When it could take part, with or without the state; None if it never could.
        gone_s, why: When and how it ended; None while it lives.
        taken: How many states and how many mean gradients it has got from others.
        reported: The last step that it has made as a member.
        lost_s: When the coordinator knew that it had ended.
        has_left: Whether it was dismissed, as one that was asked to leave.
    """

    state: WorkerState
    host: str
    started_s: float
    ready_s: float | None = None
    gone_s: float | None = None
    why: str = ""
    is_stopped: bool = False
    lost_s: float | None = None
    has_left: bool = False
    taken: list[int] = field(default_factory=lambda: [0, 0])
    reported: int = 0
    attempts: int = 0
    making: "_Making | None" = None

    @property
    def acts(self) -> bool:
        """Whether it can do anything."""
        return self.gone_s is None and not self.is_stopped


@dataclass
class _Making:
    """A step that members make: when each begins to compute, and which micro-batches."""

    step: int
    members: tuple[int, ...]
    starts: Mapping[int, float]
    todo: Mapping[int, Sequence[Leaves]]
    kept: Mapping[int, Sequence[Leaves]]
    is_done: bool = False
    is_stopped: bool = False


class VirtualMembers:
    """Workers, their coordinator and their clock.

    Attributes:
        now: The time.
        epochs: Those that have begun.
        processes: All that were started, by number.
        steps_done: The last step that was made.
        over_s: When the run ended; None before.
        is_short: Whether it ended because too few workers were left, and none was starting.
    """

    def __init__(self, limits: ElasticLimits, *, hosts: Sequence[str], steps: int, costs: Costs) -> None:
        """Start the first workers; their first step begins at time 0.

        Args:
            limits: How many workers may take part.
            hosts: The host of each worker that is started, or may be later, by number.
            steps: How many steps the run makes.
            costs: What takes time.
        """
        self.now, self.steps_done, self.is_short = 0.0, 0, False
        self.over_s: float | None = None
        self.epochs: list[Epoch] = []
        self.processes: dict[int, Process] = {}
        self.on_step: Callable[[], None] = lambda: None
        self._limits, self._hosts, self._steps, self._costs = limits, hosts, steps, costs
        terms = Terms(limits.minimum, limits.maximum, limits.micro_batches, frozenset(range(limits.first)))
        self.coordinator = Coordinator(terms)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._reasons: list[str] = []
        self._step_times: list[float] = []
        self._last_s = 0.0  # when the last step was done
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
            self._end(is_short=True)

    # What faults do

    def start_next(self) -> int | None:
        """Start the next worker that was never started; None if all were."""
        free = [number for number in range(len(self._hosts)) if number not in self.processes]
        return self._start(free[0]) if free else None

    def end(self, number: int, why: str) -> None:
        """End a process."""
        self._note_end(number, why)
        self.at(self.now + self._costs.notice_s, lambda: self._lose(number))

    def stop(self, number: int) -> None:
        """Stop a process for good; it is killed when it has made no progress for long."""
        process = self.processes[number]
        process.is_stopped = True
        quiet_s = limit_for(median(self._step_times[-64:]) if self._step_times else 0.0)
        quiet_s = quiet_s if self.coordinator.has_member(number) else max(quiet_s, SILENT_S)

        def kill() -> None:
            if process.gone_s is None:
                self._note_end(number, f"made no progress for {quiet_s:.1f} s and was killed")
                self._lose(number)

        self.at(self.now + quiet_s, kill)

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

    def _start(self, number: int) -> int:
        self.processes[number] = Process(WorkerState(Member(number, 0)), self._hosts[number], self.now)
        self.at(self.now + self._costs.start_s, lambda: self._register(number, None, follows=True))
        return number

    def _register(self, number: int, applied: int | None, *, follows: bool) -> None:
        process = self.processes[number]
        if not process.acts or self.coordinator.phase in _OVER:
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
        """Tell the coordinator of an end, and start a worker in its place."""
        process, place = self.processes[number], number % self._limits.first
        process.lost_s = self.now
        has_taken_part = any(number in one.members and one.steps for one in self.epochs)
        self._futile[place] = 0 if has_taken_part else self._futile.get(place, 0) + 1
        self._reasons.append(f"{worker_name(number)} {process.why}")
        self._handle(Lost(Member(number, 0)))
        if self.coordinator.phase in _OVER:
            return
        rows = range(place, len(self._hosts), self._limits.first)
        free = [one for one in rows if one not in self.processes]
        if free and self._futile[place] < FUTILE:
            self._start(free[0])
        there = [one for one in self.processes.values() if one.lost_s is None and not one.has_left]
        if len(there) < self._limits.minimum and self.coordinator.phase is not Phase.RUNNING:
            self._end(is_short=True)

    def _end(self, *, is_short: bool = False) -> None:
        self.over_s, self.is_short = self.now, is_short

    # The coordinator

    def _handle(self, event: Event) -> None:
        before = self.coordinator
        self.coordinator, orders = decide(before, event)
        latency_s = self._costs.latency_s if self.epochs else 0.0  # the clock begins with the first step
        for order in orders:
            self._deliver(order, latency_s)
        begin = self.coordinator.begin
        if begin is not None and begin is not before.begin and self.coordinator.phase is Phase.RUNNING:
            self._begin(begin, self.now + latency_s)
        if self.coordinator.phase in _OVER and self.over_s is None:
            self._end()

    def _deliver(self, order: Order, latency_s: float) -> None:
        if not isinstance(order.message, Begin):
            self.at(self.now + latency_s, lambda: self._take(order, latency_s))

    def _take(self, order: Order, latency_s: float) -> None:
        """Let a worker obey."""
        number = order.to.number
        process = self.processes[number]
        if not process.acts:
            return
        match order.message:
            case Prepare(epoch) if epoch > process.state.epoch:
                stopped_s = self._stop_step(number)
                process.state = worker.prepare(process.state, order.message)
                self.at(stopped_s + latency_s, lambda: self._answer(number, epoch))
            case Follow(seats=seats) if process.state.begin is None and not process.attempts:
                self._follow(number, [seat.member.number for seat in seats])
            case Dismiss():
                process.gone_s, process.has_left, process.why = self.now, True, "left"

    def _answer(self, number: int, epoch: int) -> None:
        process = self.processes[number]
        if process.acts and process.state.epoch == epoch:
            self._handle(worker.answer(process.state))

    # Steps

    def _begin(self, begin: Begin, at_s: float) -> None:
        anew = sum(stop - first for rows in begin.todo for first, stop in rows) if self.epochs else 0
        came = [one for one in begin.numbers if self.epochs and one not in self.epochs[-1].members]
        reasons = [*self._reasons, *(f"{worker_name(one)} joined" for one in came)]
        self._reasons = []
        known = begin.epoch, begin.numbers, begin.applied, at_s, tuple(dict.fromkeys(reasons)), anew, begin.blocks
        self.epochs.append(Epoch(*known))
        self._futile |= {number % self._limits.first: 0 for number in begin.numbers}
        behind, starts = dict(begin.behind), dict.fromkeys(begin.numbers, at_s)
        for number, applied in behind.items():
            process = self.processes[number]
            is_mean = applied is not None and applied + 1 == begin.applied
            process.taken[is_mean] += 1
            process.ready_s = self.now if process.ready_s is None else process.ready_s
            starts[number] += (self._costs.mean_s if is_mean else self._costs.state_s)(number, begin.holders)
        for number in begin.numbers:
            process = self.processes[number]
            process.state = worker.begin(process.state, begin)
            if number in behind and process.state.begin is not None:
                process.state = worker.catch_up(process.state)
        if begin.applied >= self._steps:
            self.at(max(starts.values()), lambda: self._report(begin, begin.applied))
            return
        todo, kept = (dict(zip(begin.numbers, rows, strict=True)) for rows in (begin.todo, begin.kept))
        self._make(_Making(begin.applied + 1, begin.numbers, starts, todo, kept), begin)

    def _make(self, making: _Making, begin: Begin) -> None:
        """Let the members make a step."""
        for number in making.members:
            self.processes[number].making = making
        leaf_s = {number: self._costs.leaf_s(number) for number in making.members}
        longest_s = max(
            (stop - first) * leaf_s[one] for one, (first, stop) in zip(begin.numbers, begin.blocks, strict=True)
        )
        computed_s = max(making.starts[one] + _size(making.todo[one]) * leaf_s[one] for one in making.members)
        self.at(computed_s + self._costs.step_s(making.members) - longest_s, lambda: self._end_step(making, begin))

    def _end_step(self, making: _Making, begin: Begin) -> None:
        if making.is_stopped or not all(self.processes[number].acts for number in making.members):
            return  # some of it is missing
        making.is_done = True
        epoch, step_s = self.epochs[-1], self._costs.step_s(making.members)
        if epoch.done_s is None:
            epoch.done_s, epoch.lost_s = self.now, self.now - self._last_s - step_s
        epoch.steps, self.steps_done = epoch.steps + 1, making.step
        self._step_times.append(self.now - self._last_s)
        self._last_s = self.now
        for number in making.members:
            process = self.processes[number]
            process.state, process.reported = worker.end_step(worker.apply(process.state)), making.step
        blocks = {number: (block,) for number, block in zip(begin.numbers, begin.blocks, strict=True)}
        nothing: Mapping[int, Sequence[Leaves]] = dict.fromkeys(begin.numbers, ())
        if making.step < self._steps:
            starts = dict.fromkeys(begin.numbers, self.now)
            self._make(_Making(making.step + 1, begin.numbers, starts, blocks, nothing), begin)
        for step, deed in [one for one in self._after_step if one[0] <= making.step]:
            self._after_step.remove((step, deed))
            deed()
        self.on_step()  # before the last report: a worker that ends then has not done what follows the last step
        self._report(begin, making.step)

    def _report(self, begin: Begin, step: int) -> None:
        for number in begin.numbers:
            process = self.processes[number]
            if step >= self._steps and process.state.begin is begin:
                process.state = worker.end_run(process.state)
            if process.acts:
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
        has = {leaf for first, stop in making.kept[number] for leaf in range(first, stop)} | set(todo[:done])
        process.state = worker.hold(process.state, tuple(_nodes(has)))
        return max(self.now, start_s + done * leaf_s) if done else self.now

    # Workers that come

    def _follow(self, number: int, members: Sequence[int]) -> None:
        """Get the state after the step that is being made, and then what is missing."""
        process = self.processes[number]
        process.attempts += 1
        step = min(self._steps, self.steps_done + 1)

        def ask() -> None:
            self.at(self.now + self._costs.state_s(number, members) + self._costs.leaf_s(number), take)

        def take() -> None:
            if process.acts and process.state.epoch == 0:
                process.taken[0] += 1
                process.state = changed(process.state, applied=step)
                self._catch_up(number, members)

        self._after_step.append((step, ask))

    def _catch_up(self, number: int, members: Sequence[int]) -> None:
        """Apply the mean gradients of the steps that others have made meanwhile; then say that this worker can take part."""
        process = self.processes[number]
        applied = process.state.applied
        if applied is None or not process.acts or process.state.epoch:
            return
        if self.steps_done - applied > self._costs.most_means:
            process.state = changed(process.state, applied=None)
            if process.attempts < _ATTEMPTS:
                self._follow(number, members)
            else:
                self._register(number, None, follows=False)
        elif self.steps_done > applied:
            process.taken[1] += 1
            process.state = changed(process.state, applied=applied + 1)
            self.at(self.now + self._costs.mean_s(number, members), lambda: self._catch_up(number, members))
        else:
            self._register(number, applied, follows=True)


def _size(rows: Sequence[Leaves]) -> int:
    return sum(stop - first for first, stop in rows)


def _nodes(leaves: set[int]) -> list[Leaves]:
    """Return the largest nodes of the tree that these micro-batches make up."""
    rows: list[range] = []
    for leaf in sorted(leaves):
        rows[-1:] = (
            [range(rows[-1].start, leaf + 1)] if rows and rows[-1].stop == leaf else [*rows[-1:], range(leaf, leaf + 1)]
        )
    return [(node.start, node.stop) for row in rows for node in aligned_subtrees(row)]
