"""Many workers of an elastic run on a virtual clock, of which some come, leave, are killed or fall silent all the time.

The coordinator is `ttlaunch/membership/coordinator.py` itself, a worker the state machine of `ttlaunch/membership/worker.py`. A process
does not exist: what it would compute is a time on the clock, and what it has of a step is the leaves that it says. Messages take some
milliseconds, drawn with a seed, so they overtake one another.

    join    a new worker, or another process in the place of one that was lost; it gets the weights while the others go on
    leave   somebody asks a worker to leave
    kill    a process ends, and the coordinator hears of it at once
    silent  a worker neither computes nor answers; it counts as lost when its lease is over. Half of them wake up later, and speak
            of an epoch that is over, as a process of which others have gone on without; told so, it comes again

The coordinator takes at once what workers have reported since its last look, as the supervisor of a run does. After each transition
what it has changed is checked, and all that is known at each begin of an epoch (`Violation` says what is wrong):
    epochs only grow, and one that begins starts from the largest step that any worker has applied: no step is made twice;
    ranks are the places among the sorted numbers; no number has two incarnations; an earlier one changes nothing, and is told;
    whoever lives, has registered and was not dismissed is known, and whoever is lost is not;
    each leaf of a step is at exactly one member, in the epoch's first step and in later ones;
    an epoch begins when the last worker has answered that lives.
"""

import random
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import chain, groupby
from typing import Any, TypeVar

from tests.membership.explorer import Violation
from ttlaunch.membership import coordinator, worker
from ttlaunch.membership.coordinator import Result
from ttlaunch.membership.coordinator_state import Coordinator, Phase, Terms
from ttlaunch.membership.messages import (
    Answered,
    Begin,
    Dismiss,
    Event,
    Follow,
    LeaveAsked,
    Lost,
    Member,
    Message,
    Order,
    Prepare,
    Progressed,
    Registered,
    Seat,
    Tick,
)
from ttlaunch.membership.worker import Leaves, WorkerState
from ttlaunch.spec.recipe.blocks import aligned_subtrees

T = TypeVar("T")
Action = tuple[Any, ...]

_TICK_S = 0.5
_LOOK_S = 0.001  # the coordinator takes reports together that come within this time: a tenth of that of a real one
_GROUPS, _GROUP = (
    8,
    128,
)  # what goes to all at once arrives at so many moments at the least, and reaches so many at one at the most
_ON_A_HOST = 8  # and so many workers, which share a host, answer it at the same one
_AWAITED_S = 5.0  # an epoch may be awaited so long after the last that is lost


@dataclass(frozen=True)
class Climate:
    """How large a fleet is, and what happens to it.

    Attributes:
        churn: Which part of the workers changes in each minute.
        spread_s: Within how many seconds of a minute they do.
        step_s: How long a step takes.
        lease_s: After how many seconds of silence a worker counts as lost.
        wakes_after_s: After how many seconds a lost worker speaks again, one drawn for each; 0: never.
        checks_all: Whether all is checked after each transition, in place of what it has changed.
    """

    workers: int = 10_000
    micro_batches: int = 16_384
    minutes: int = 60
    churn: float = 0.01
    spread_s: float = 2.0
    step_s: float = 30.0
    lease_s: float = 15.0
    wakes_after_s: tuple[float, ...] = (0.0, 45.0)
    seed: int = 0
    checks_all: bool = False


class Process:
    """A worker's process; it is asleep while it is silent."""

    __slots__ = ("follows", "has_answered", "is_asleep", "is_lost", "state")

    def __init__(self, state: WorkerState, *, follows: bool = False) -> None:
        self.state, self.follows = state, follows
        self.is_asleep = self.is_lost = False
        self.has_answered = 0  # in which epoch


@dataclass
class Measured:
    """What happened in a fleet, and the seconds of each transition by the kind of its first event."""

    seconds: dict[str, "array[float]"] = field(default_factory=dict)
    events: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    steps: int = 0
    fenced: int = 0
    workers: int = 0


class Fleet:
    """Workers and their coordinator."""

    def __init__(self, climate: Climate, *, step: Callable[..., Result] = coordinator.step) -> None:
        """Start the first workers at time 0."""
        self.climate, self._step, self._random = climate, step, random.Random(climate.seed)  # noqa: S311 - no secret
        terms = Terms(1, 2 * climate.workers, climate.micro_batches, frozenset(range(climate.workers)))
        self.state = Coordinator(terms)
        self.processes: dict[int, Process] = {}  # the newest of each number, unless it has ended
        self._known: dict[int, Member] = {}  # those that have registered, and were neither lost nor dismissed
        self.measured = Measured()
        self._seconds: dict[type[Event], array[float]] = defaultdict(lambda: array("d"))
        self._newest: dict[int, int] = {}  # incarnations
        self._gone: list[int] = []  # numbers of lost workers in whose place others may come
        self._awake: list[Process] = []  # processes that were counted as lost, and live
        self._asked: set[int] = set()  # to leave
        self._acting = 0  # members of this epoch that have begun
        self._reports: list[Answered | Progressed] = []  # since the coordinator's last look
        self._heap: list[tuple[float, int, Action]] = []
        self._order, self._applied, self._disturbed = 0, 0, 0.0
        self.now = 0.0
        for number in range(climate.workers):
            self._start(number, applied=0)
        self._after(_TICK_S, "tick")
        for minute in range(1, climate.minutes):
            for _ in range(round(climate.workers * climate.churn)):
                self._after(60 * minute + self._random.uniform(0, climate.spread_s), "change")

    def run(self) -> Measured:
        """Let the time pass; returns what happened.

        Raises:
            Violation: Something is wrong.
        """
        ends, heap = 60.0 * self.climate.minutes, self._heap
        while heap and heap[0][0] <= ends:
            self.now, _, (name, *values) = heappop(heap)
            getattr(self, f"_do_{name}")(*values)
        self._check_all()
        self.measured.epochs, self.measured.steps = self.state.epoch, self._applied
        self.measured.workers = len(self.state.members)
        self.measured.seconds = {kind.__name__: seconds for kind, seconds in self._seconds.items()}
        return self.measured

    def _after(self, seconds: float, *action: Any) -> None:
        self._order += 1
        heappush(self._heap, (self.now + seconds, self._order, action))

    def _soon(self) -> float:
        return 0.001 + 0.05 * self._random.random()

    # What happens to workers

    def _start(self, number: int, *, applied: int | None, held: tuple[Leaves, ...] = ()) -> None:
        incarnation = self._newest.get(number, -1) + 1
        self._newest[number] = incarnation
        state = WorkerState(Member(number, incarnation), applied=applied, held=held, validated=applied)
        self.processes[number] = process = Process(state, follows=applied is None)
        self._after(self._soon(), "register", process)

    def _do_change(self) -> None:
        kind = self._random.choice(("join", "join", "join", "leave", "kill", "silent"))
        self.measured.changes[kind] += 1
        if kind == "join":
            number = self._gone.pop() if self._gone and self._random.random() < 1 / 2 else len(self._newest)
            self._start(number, applied=None)
            return
        process = self._random.choice(list(self.processes.values()))
        number = process.state.member.number
        if kind == "leave":
            self._asked.add(number)
            self._feed(LeaveAsked(number))
        elif kind == "kill":
            process.is_asleep = True
            self._after(self._soon(), "lose", process, 0.0)
        elif not process.is_asleep:
            process.is_asleep = True
            wakes_after_s = self._random.choice(self.climate.wakes_after_s)
            self._after(self.climate.lease_s, "lose", process, wakes_after_s)

    def _do_lose(self, process: Process, wakes_after_s: float) -> None:
        member = process.state.member
        if process.is_lost or self.processes.get(member.number) is not process:
            return
        process.is_lost = True
        self._do_look()  # what it has reported while it was known
        del self.processes[member.number]
        self._known.pop(member.number, None)
        self._feed(Lost(member))
        if wakes_after_s:
            self._after(wakes_after_s, "wake", process)
        else:
            self._gone.append(member.number)

    def _do_wake(self, process: Process) -> None:
        """Let a process speak that others have gone on without."""
        process.is_asleep = False
        self._awake.append(process)
        late = (
            worker.answer(process.state)
            if self._random.random() < 1 / 2
            else worker.progress(process.state, pace_s=1.0)
        )
        self._report([late])

    def _do_tick(self) -> None:
        self._feed(Tick())
        self._after(_TICK_S, "tick")
        lasts = self.state.phase is Phase.COLLECTING and self.now - self._disturbed > self.climate.lease_s + _AWAITED_S
        if lasts:
            raise Violation(f"epoch {self.state.epoch} does not begin although all that live have answered")

    # What workers do

    def _do_register(self, process: Process) -> None:
        if process.is_asleep or process.is_lost:
            return
        self._do_look()  # what was reported before it is known
        state = process.state
        self._known[state.member.number] = state.member
        self._feed(Registered(Seat(state.member), state.applied, follows=process.follows))

    def _do_deliver(self, members: tuple[Member, ...], message: Message) -> None:
        found = [self._addressed(member) for member in members]
        processes = [process for process in found if process is not None and not process.is_asleep]
        match message:
            case Begin():
                self._begin(processes, message)
            case Prepare():
                self._prepare(processes, message)
            case Follow():
                for process in processes:
                    if process.state.applied is None:
                        self._after(self._random.uniform(2, 5), "followed", process, message.epoch)
            case Dismiss():
                for process in processes:
                    self._end(process)

    def _end(self, process: Process) -> None:
        number = process.state.member.number
        if process in self._awake:  # it was counted as lost and lives: it comes again with what it has
            self._awake.remove(process)
            self._stop(process, Prepare(process.state.epoch + 1))
            self._start(number, applied=process.state.applied, held=process.state.held)
        elif self.processes.get(number) is process:
            del self.processes[number]

    def _prepare(self, processes: list[Process], order: Prepare) -> None:
        answering = [process for process in processes if order.epoch > process.state.epoch]
        again = [process for process in processes if process.has_answered == order.epoch]
        for process in answering:
            self._stop(process, order)
        for place in range(0, len(answering), _ON_A_HOST):
            some = answering[place : place + _ON_A_HOST]
            self._after(0.01 + 0.5 * self._random.random(), "answer", some, order.epoch)
        for process in again:
            self._after(self._soon(), "answer", [process], order.epoch)

    def _stop(self, process: Process, order: Prepare) -> None:
        state = process.state
        nodes = state.held
        if state.begin is not None:
            # It has computed some of its leaves, which make nodes of the tree as far as they go.
            possible = _nodes_of(worker.leaves_to_compute(state))
            nodes += possible[int(len(possible) * self._random.random())]
        process.state = worker.hold(worker.prepare(state, order), nodes)

    def _do_answer(self, processes: list[Process], epoch: int) -> None:
        answers = []
        for process in processes:
            state = process.state
            if not process.is_asleep and state.epoch == epoch and state.begin is None:
                process.has_answered = epoch
                answers.append(worker.answer(state))
        self._report(answers)

    def _do_followed(self, process: Process, epoch: int) -> None:
        if not process.is_asleep and process.state.applied is None and not process.state.epoch:
            del epoch
            process.state = worker.end_step(worker.WorkerState(process.state.member, applied=self._applied))
            self._do_register(process)

    def _begin(self, processes: list[Process], order: Begin) -> None:
        acting = []
        for process in processes:
            before = process.state
            process.state = state = worker.begin(before, order)
            if state is before:
                continue
            if state.applied == order.applied:
                acting.append(state)
            else:
                self._after(self._random.uniform(0.1, 1), "caught_up", process, order.epoch)
        self._act(acting)

    def _do_caught_up(self, process: Process, epoch: int) -> None:
        if not process.is_asleep and process.state.epoch == epoch and process.state.begin is not None:
            process.state = worker.catch_up(process.state)
            self._act([process.state])

    def _act(self, states: list[WorkerState]) -> None:
        """Have members begin to compute; the first step is over some time after the last has."""
        self._report([worker.progress(state, pace_s=1.0) for state in states])
        self._acting += len(states)
        if states and self.state.begin is not None and self._acting == len(self.state.members):
            self._after(self.climate.step_s, "step", self.state.epoch)

    def _do_step(self, epoch: int) -> None:
        """End a step of an epoch, which needs what all its members have sent."""
        if epoch != self.state.epoch or self.state.begin is None:
            return
        members = [self.processes.get(number) for number in self.state.members]
        if any(one is None or one.is_asleep for one in members):
            return  # they wait until those are lost
        self._applied += 1
        for some in _groups(members):
            self._after(self._soon(), "apply", some, epoch)
        self._after(self.climate.step_s, "step", epoch)

    def _do_apply(self, processes: list[Process], epoch: int) -> None:
        """Apply the update and report it, unless the process was ordered to stop before."""
        reports = []
        for process in processes:
            state = process.state
            if not process.is_asleep and state.epoch == epoch and state.begin is not None:
                process.state = state = worker.end_step(worker.apply(state))
                if state.applied != self._applied:
                    number = state.member.number
                    raise Violation(f"worker {number} makes step {state.applied} in place of {self._applied}")
                reports.append(worker.progress(state, pace_s=1.0))
        self._report(reports)

    # The coordinator

    def _report(self, reports: Sequence[Answered | Progressed]) -> None:
        """Let the coordinator find these reports at its next look."""
        if reports and not self._reports:
            self._after(_LOOK_S, "look")
        self._reports += reports

    def _do_look(self) -> None:
        """Take the reports that have come; what a process says that was lost is taken alone, to see what follows from it."""
        reports, self._reports = self._reports, []
        known = self._known
        for is_known, some in groupby(reports, lambda report: known.get(report.member.number) is report.member):
            if is_known:
                self._take(*some)
                continue
            for report in some:
                self._check_fence(self.state, report.member, self._take(report))

    def _feed(self, event: Event) -> None:
        """Let the coordinator take something else than a report; what was reported before, it takes first."""
        self._do_look()
        if not isinstance(event, Tick):
            self._disturbed = self.now
        self._take(event)

    def _take(self, *events: Event) -> list[Order]:
        before, began = self.state, time.perf_counter()
        self.state, orders = self._step(before, *events)
        self._seconds[type(events[0])].append(time.perf_counter() - began)
        self.measured.events += len(events)
        self._note_farewells(orders)
        self._check(before)
        for order in orders:
            for some in _groups(order.to):
                self._after(self._soon(), "deliver", some, order.message)
        return orders

    def _note_farewells(self, orders: list[Order]) -> None:
        for member in (member for order in orders if isinstance(order.message, Dismiss) for member in order.to):
            number = member.number
            if self._known.get(number) == member:
                if number not in self._asked:
                    raise Violation(f"worker {number} is dismissed although it lives and nobody has asked it to leave")
                del self._known[number]

    def _addressed(self, member: Member) -> Process | None:
        process = self.processes.get(member.number)
        if process is not None and (process.state.member is member or process.state.member == member):
            return process
        return next((one for one in self._awake if one.state.member == member), None)

    # Rules

    def _check(self, before: Coordinator) -> None:
        after = self.state
        if not before.epoch <= after.epoch <= before.epoch + 1:
            raise Violation(f"the epoch goes from {before.epoch} to {after.epoch}")
        if after.phase is Phase.STRANDED:
            raise Violation("the run is stranded although workers have the weights")
        if after.begin is not before.begin and after.begin is not None:
            self._acting = 0
            self._check_begin(after.begin)
            self._check_all()
        elif self.climate.checks_all:
            self._check_all()

    def _check_fence(self, before: Coordinator, member: Member, orders: list[Order]) -> None:
        """Check what follows from a report of a process with which nobody counts any more."""
        self.measured.fenced += 1
        if self.state != before:
            raise Violation(f"a report of {member}, which is lost, changes what is known")
        if [order.to for order in orders] != [(member,)] or not isinstance(orders[0].message, Dismiss):
            raise Violation(f"{member} is not told that others have gone on without it")

    def _check_begin(self, begin: Begin) -> None:
        numbers = [seat.member.number for seat in begin.seats]
        if numbers != sorted(set(numbers)) or tuple(numbers) != self.state.members:
            raise Violation(f"epoch {begin.epoch}: ranks are not the places among the sorted numbers")
        if begin.epoch != self.state.epoch:
            raise Violation(f"epoch {begin.epoch} begins in epoch {self.state.epoch}")
        newest = max(one.state.applied or 0 for one in self.processes.values())
        if begin.applied != newest:
            raise Violation(f"epoch {begin.epoch} starts from step {begin.applied}, and step {newest} is made")
        if sorted([*(number for number, _ in begin.behind), *begin.holders]) != numbers:
            raise Violation(f"epoch {begin.epoch}: not each member either has step {begin.applied} or lacks it")
        for leaves in (chain(*begin.kept, *begin.todo), begin.blocks):
            found = sorted(leaves)
            ends = [0, *(stop for _, stop in found)]
            if [first for first, _ in found] != ends[:-1] or ends[-1] != self.climate.micro_batches:
                raise Violation(f"epoch {begin.epoch}: not each leaf is at one member")
        for number, kept in zip(numbers, begin.kept, strict=True):
            if kept and not set(kept) <= set(self.processes[number].state.held if number in self.processes else ()):
                raise Violation(f"epoch {begin.epoch}: worker {number} has not {kept}")

    def _check_all(self) -> None:
        state = self.state
        if list(state.members) != sorted(set(state.members)):
            raise Violation("members are not sorted")
        known = {number: one.seat.member for number, one in state.workers.items()}
        if known != self._known:
            self._blame(known)
        if any(member.incarnation != state.seen[number] for number, member in known.items()):
            raise Violation("a worker has two incarnations")
        answered = state.answers if state.phase is Phase.COLLECTING else ()
        for numbers in (state.members, state.leaving, answered, state.acting):
            if not known.keys() >= set(numbers):
                raise Violation("a member is not known")

    def _blame(self, known: dict[int, Member]) -> None:
        for number, member in known.items():
            if self._known.get(number) != member:
                raise Violation(f"worker {number} is known although it is lost, or by another incarnation")
        raise Violation(f"workers {sorted(self._known.keys() - known.keys())} live and are not known")


def _groups(all_at_once: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield those who do something at the same moment when all do it at about the same time: neighbours, as on a host."""
    size = max(1, min(_GROUP, len(all_at_once) // _GROUPS))
    return (all_at_once[first : first + size] for first in range(0, len(all_at_once), size))


@cache
def _nodes_of(rows: tuple[Leaves, ...]) -> list[tuple[Leaves, ...]]:
    """Return the nodes that a worker has of its leaves, for each number of them that it may have computed."""
    found: list[tuple[Leaves, ...]] = [()]
    for first, stop in rows:
        before = found[-1]
        for end in range(first + 1, stop + 1):
            nodes = aligned_subtrees(range(first, end))
            found.append((*before, *((node.start, node.stop) for node in nodes)))
    return found
