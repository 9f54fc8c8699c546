"""Every order of events of an elastic run: processes, the coordinator, and a network between them that may do anything.

The coordinator is `ttlaunch/membership/coordinator.py` itself, a process is in `process.py`. Orders may be late, repeated and
lost. What a process reports is repeated until something changes, so it, too, may be late or lost. A process may crash at any
moment, and lose any part of what it has sent last; the coordinator may count it as lost although it lives; processes may come,
and may be asked to leave. How often each of these happens is bounded by a `Setting`.

A rule is broken if
    a sum does not contain each leaf of its step exactly once;
    an epoch goes back, or begins for no reason;
    a process takes part after it was counted as lost, or two with one number do;
    the ranks of an epoch are not the places among the sorted numbers;
    a validation is skipped, or made again although every holder has made it;
    whoever lacks one mean has to get the whole state, or a holder goes on before others have got its state;
    a member counts as one that has made a step which is not in its weights;
    a run ends although a member lacks the last step;
    an epoch begins although nobody has a slot of the state, or one is given up before all who need it have got it.
From every state in which somebody who lives has the weights, the run must be able to finish; where the state is cut, from every
state in which one process has crashed, or those who live have every slot.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from tests.membership import process as acts
from tests.membership.explorer import Violation
from tests.membership.process import Frame, Kind, Process, Work
from ttlaunch.membership.coordinator_state import Coordinator, Phase, Terms
from ttlaunch.membership.messages import (
    Begin,
    CutOff,
    Dismiss,
    EndOrdered,
    Event,
    Finish,
    Follow,
    LeaveAsked,
    Lost,
    Member,
    Order,
    Prepare,
    Registered,
    Seat,
    Tick,
)
from ttlaunch.membership.slots import covering_cut, divide_slots
from ttlaunch.membership.worker import WorkerState


@dataclass(frozen=True)
class Budget:
    """How often something happens at the most.

    Attributes:
        returns: How many processes that were dismissed may come again; one more for each that is counted as lost and lives.
        ends: How often the run may be ordered to stop.
        breaks: How often a member may say that it has lost its connection to another one, although nobody has ended.
    """

    crashes: int = 0
    suspicions: int = 0
    joins: int = 0
    leaves: int = 0
    lost_orders: int = 0
    returns: int = 0
    ends: int = 0
    breaks: int = 0

    def less(self, name: str) -> "Budget":
        """Return what is left after one of these."""
        return replace(self, **{name: getattr(self, name) - 1})

    @property
    def changes(self) -> int:
        """How many epochs may follow from all that may still happen."""
        return 2 * self.crashes + 3 * self.suspicions + 2 * self.joins + 3 * self.leaves + self.breaks


@dataclass(frozen=True)
class Setting:
    """What is explored.

    Attributes:
        workers: Those that are started with the run.
        is_running: Whether it begins with the first epoch under way; otherwise with workers that are not ready.
        comes_again: Whether a process that is dismissed although it lives registers again with what it has; otherwise it ends.
        follows: Whether processes that come get the state from the members while these go on.
    """

    workers: int = 2
    minimum: int = 1
    maximum: int = 2
    work: Work = field(default_factory=Work)
    budget: Budget = Budget()
    is_running: bool = True
    comes_again: bool = True
    follows: bool = True


State = tuple[int, tuple[int, ...], frozenset[tuple[int, int]], Budget]
"""The coordinator, the processes, orders under way as (place of the process, order), and what may still happen: as indices."""


class _Numbered:
    """Gives each value a number, so that states are small and what follows from a value is worked out once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Any) -> int:
        key = _hashable(value) if isinstance(value, Coordinator) else value
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.values)
            self.values.append(value)
        return found


def _hashable(state: Coordinator) -> Hashable:
    values = [getattr(state, one.name) for one in fields(state) if one.name != "terms"]
    return tuple(tuple(sorted(value.items())) if isinstance(value, Mapping) else value for value in values)


class World:
    """A `System` of the explorer."""

    def __init__(self, setting: Setting) -> None:
        """Explore what may happen in a setting."""
        self.setting = setting
        self.work = setting.work
        self._coordinators, self._processes, self._orders = _Numbered(), _Numbered(), _Numbered()
        self._after: dict[tuple[int, Event], tuple[int, tuple[Order, ...]]] = {}
        self._steps: dict[tuple[int, ...], tuple[tuple[str, int, Frame | None], ...]] = {}
        self._taken: dict[tuple[int, Frame], int] = {}

    # A system

    def first(self) -> State:
        """Return workers that are not ready, or that have begun the first epoch."""
        numbers = range(self.setting.workers)
        terms = Terms(self.setting.minimum, self.setting.maximum, self.work.micro_batches, first=frozenset(numbers))
        processes = [
            Process(WorkerState(Member(number, 0), applied=0, validated=0), ended=0, content=0) for number in numbers
        ]
        if self.work.slots is not None:
            terms = replace(terms, slots=self.work.slots)
            slots = divide_slots([""] * len(numbers), slots=self.work.slots)
            shares = [(self.work.rules.keeps(slots.of(number)),) for number in numbers]
            processes = [replace(one, state=replace(one.state, shares=shares[one.number])) for one in processes]
        state: State = (
            self._coordinators.number(Coordinator(terms)),
            tuple(map(self._processes.number, processes)),
            frozenset(),
            self.setting.budget,
        )
        calm = replace(self.setting.budget, **{one.name: 0 for one in fields(Budget)})
        while self.setting.is_running:
            ways = {name: after for name, after in self._possible((*state[:3], calm)) if after[:3] != state[:3]}
            awaited = [name for name in ways if name.split()[0] in {"report", "prepare", "begin"}]
            awaited = [name for name in awaited if not self._has_begun(state, name)]
            if not awaited:
                break
            state = (*ways[awaited[0]][:3], state[3])
        return state

    def _has_begun(self, state: State, event: str) -> bool:
        return self._process(state, int(event.split()[1])).state.begin is not None

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield every event that changes the state."""
        for event, after in self._possible(state):
            if after != state:
                yield event, after

    def has_ended(self, state: State) -> bool:
        """Whether the run is finished, and every process knows."""
        coordinator = self._coordinator(state)
        return coordinator.phase is Phase.FINISHED and not any(one.is_alive for one in self._all(state))

    def should_end(self, state: State) -> bool:
        """Whether enough live, and one of them has the weights."""
        leaving = self._coordinator(state).leaving
        living = [one for one in self._all(state) if one.is_alive]
        staying = len({one.number for one in living} - leaving) + state[3].joins
        enough = self._coordinator(state).minimum
        if self.work.slots is not None and self.setting.budget.crashes - state[3].crashes > 1:
            # The owner of a slot and its shadow may be gone together. Of one process, the others have all that it had.
            return staying >= enough and covering_cut(one.state.shares for one in living) is not None
        return staying >= enough and any(one.state.applied is not None for one in living)

    # Events

    def _possible(self, state: State) -> Iterator[tuple[str, State]]:
        coordinator, budget = self._coordinator(state), state[3]
        for place, one in enumerate(self._all(state)):
            if one.is_alive:
                yield from self._of_process(state, place, one)
                yield from self._report(state, place, one)
                if budget.crashes:
                    yield from self._crash(state, place, one)
            known = coordinator.workers.get(one.number)
            is_known = known is not None and known.seat.member == one.state.member
            is_awaited = coordinator.phase is Phase.WAITING and one.number not in coordinator.seen
            if not one.is_alive and (is_known or is_awaited):
                yield self._tell(state, f"lost {one.number}", Lost(one.state.member))
            elif one.is_alive and is_known and budget.suspicions:
                returns = budget.returns + self.setting.comes_again
                spent = (*state[:3], replace(budget.less("suspicions"), returns=returns))
                yield self._tell(spent, f"suspect {one.number}", Lost(one.state.member))
            if one.is_alive and budget.breaks and one.state.begin is not None:
                spent = (*state[:3], budget.less("breaks"))
                said = CutOff(one.state.member, one.state.epoch, one.state.applied)
                yield self._tell(spent, f"cut off {one.number}", said)
            if one.is_alive and is_known and budget.leaves and one.number not in coordinator.leaving:
                spent = (*state[:3], budget.less("leaves"))
                yield self._tell(spent, f"leave {one.number}", LeaveAsked(one.number))
        yield from self._deliver(state)
        if budget.joins:
            yield from self._join(state)
        if budget.ends:
            yield self._tell((*state[:3], budget.less("ends")), "order to end", EndOrdered())
        yield self._tell(state, "tick", Tick())

    def _report(self, state: State, place: int, one: Process) -> Iterator[tuple[str, State]]:
        yield self._tell(state, f"report {one.number}", acts.report_of(one))
        del place

    def _tell(self, state: State, name: str, event: Event) -> tuple[str, State]:
        """Let an event reach the coordinator."""
        key = (state[0], event)
        if key not in self._after:
            before = self._coordinator(state)
            try:
                after, orders = self.work.rules.step(before, event)
            except (ValueError, AssertionError, KeyError) as error:
                raise Violation(f"{name}: the coordinator raised {error!r}") from error
            if after.epoch < before.epoch:
                raise Violation(f"{name}: the epoch goes back from {before.epoch} to {after.epoch}")
            self._check_fence(name, after)
            self._after[key] = self._coordinators.number(after), tuple(orders)
        number, new = self._after[key]
        state = (number, *state[1:])
        if number != key[0]:
            self._check_change(name, state, new)
        places = {one.state.member: place for place, one in enumerate(self._all(state)) if one.is_alive}
        told = [(places[one], order.message) for order in new for one in order.to if one in places]
        under_way = {(place, self._orders.number(message)) for place, message in told}
        return name, self._tidy((state[0], state[1], state[2] | under_way, state[3]))

    def _check_fence(self, name: str, state: Coordinator) -> None:
        """Check that whoever was counted as lost cannot come back by a report that is late."""
        for number, incarnation in state.seen.items():
            known = state.workers.get(number)
            gone = range(incarnation + 1) if known is None else range(incarnation)
            for late in gone:
                member = Member(number, late)
                after, _ = self.work.rules.step(state, Registered(Seat(member), 0))
                back = after.workers.get(number)
                if back is not None and back.seat.member == member:
                    raise Violation(f"{name}: a late report brings back worker {number}, which is lost")

    def _check_change(self, name: str, state: State, orders: tuple[Order, ...]) -> None:
        after = self._coordinator(state)
        most = 1 + self.setting.budget.changes - state[3].changes
        if after.epoch > most:
            raise Violation(f"{name}: epoch {after.epoch} begins for no reason (at most {most})")
        living = {one.state.member: one for one in self._all(state)}
        for message in {order.message for order in orders if isinstance(order.message, Begin)}:
            self._check_begin(name, message, living)
        if after.phase is Phase.FINISHED and orders:
            lacking = [
                number
                for number in after.members
                if living[after.workers[number].seat.member].state.applied != self.work.steps
            ]
            if lacking:
                raise Violation(f"{name}: the run ends although {lacking} lack its last step")

    def _check_begin(self, name: str, order: Begin, living: dict[Member, Process]) -> None:
        members = {seat.member.number: living[seat.member] for seat in order.seats}
        held = {number: one.state.held for number, one in members.items()}
        holders = [members[number] for number in order.holders]
        is_due = any(one.ended != order.applied for one in holders)
        try:
            acts.check_begin(order, self.work, held=held)
        except Violation as violation:
            raise Violation(f"{name}: {violation}") from violation
        if order.validates != is_due:
            what = "made again although all holders have made it" if order.validates else "skipped"
            raise Violation(f"{name}: the validation after step {order.applied} is {what}")
        for one in holders:
            if one.content != order.applied:
                has = f"has the weights of step {one.content}, and counts as one with those of {order.applied}"
                raise Violation(f"{name}: worker {one.number} {has}")

    # Of one process

    def _of_process(self, state: State, place: int, one: Process) -> Iterator[tuple[str, State]]:
        needs, begin = one.lacks_state, one.state.begin
        holders = () if not needs or begin is None else begin.numbers if begin.shares else begin.holders
        givers = [index for index, other in enumerate(self._all(state)) if other.number in holders] if needs else []
        if one.is_following and one.source is not None:
            members = {seat.member for seat in one.source.seats}
            givers = [index for index, other in enumerate(self._all(state)) if other.state.member in members]
        key = (state[1][place], *(state[1][giver] for giver in givers))
        if key not in self._steps:
            self._steps[key] = tuple(self._steps_of(one, [self._process(state, giver) for giver in givers]))
        for name, after, frame in self._steps[key]:
            processes = list(state[1])
            processes[place] = after
            if frame is not None:
                self._send(frame, place, processes, self._members(one))
            yield f"{name} {one.number}", self._tidy((state[0], tuple(processes), *state[2:]))

    def _steps_of(self, one: Process, givers: list[Process]) -> Iterator[tuple[str, int, Frame | None]]:
        name = ""
        try:
            if one.follows and not one.state.epoch and one.state.applied is None:
                yield "give up", self._processes.number(acts.give_up(one)), None
            if one.is_following and (ahead := acts.follow(one, givers, self.work)) is not None:
                yield "follow", self._processes.number(ahead), None
            if one.lacks_state:
                name = "pull"
                if (pulled := acts.pull(one, givers, self.work)) is not None:
                    yield name, self._processes.number(pulled), None
            if one.is_between_steps:
                yield "end", self._processes.number(acts.end_step(one, self.work)), None
            if one.makes_step and one.sent < self.work.buckets:
                name = "nodes"
                after, frame = acts.send_nodes(one, self.work)
                yield name, self._processes.number(after), frame
            if acts.can_reduce(one):
                name = "mean"
                after, frame = acts.reduce(one, self.work)
                yield name, self._processes.number(after), frame
            if acts.can_apply(one, self.work):
                yield "apply", self._processes.number(acts.apply(one, self.work)), None
        except Violation as violation:
            raise Violation(f"{name} {one.number}: {violation}") from violation

    def _members(self, one: Process) -> set[Member]:
        assert one.state.begin is not None
        return {seat.member for seat in one.state.begin.seats}

    def _send(self, frame: Frame, sender: int, processes: list[int], members: set[Member]) -> None:
        """Let a frame arrive at once: that it is late is the same as that others do later what follows from it."""
        for place, number in enumerate(processes):
            one = self._processes.values[number]
            if place == sender or one.number not in {member.number for member in members}:
                continue
            key = (number, frame)
            if key not in self._taken:
                self._taken[key] = self._processes.number(acts.take(one, frame, self.work))
            processes[place] = self._taken[key]

    def _crash(self, state: State, place: int, one: Process) -> Iterator[tuple[str, State]]:
        """End a process; of what others have not used yet, each may have got all, only what came first, or nothing."""
        spent = state[3].less("crashes")
        ways = []
        for index, number in enumerate(state[1]):
            other = self._processes.values[number]
            if index == place:
                other = replace(other, is_alive=False, inbox=frozenset(), nodes=frozenset(), means=frozenset())
                ways.append([self._processes.number(other)])
                continue
            own = {frame for frame in other.inbox if frame.source == one.number and frame.epoch == one.state.epoch}
            late = {frame for frame in own if frame.kind is Kind.MEAN}
            kept = {other.inbox, other.inbox - late, other.inbox - own} if other.is_alive else {other.inbox}
            ways.append([self._processes.number(replace(other, inbox=inbox)) for inbox in sorted(kept, key=len)])
        for processes in product(*ways):
            yield f"crash {one.number}", self._tidy((state[0], processes, state[2], spent))

    def _join(self, state: State) -> Iterator[tuple[str, State]]:
        """Let a process come: under a new number, or in the place of one that has ended."""
        every = self._all(state)
        newest = {one.number: one for one in every}
        members = [Member(max(newest) + 1, 0)]
        members += [
            Member(number, one.state.member.incarnation + 1) for number, one in newest.items() if not one.is_alive
        ]
        for member in members:
            new = self._processes.number(Process(WorkerState(member), follows=self.setting.follows))
            yield (
                f"join {member.number}.{member.incarnation}",
                (state[0], (*state[1], new), state[2], state[3].less("joins")),
            )

    # Orders

    def _deliver(self, state: State) -> Iterator[tuple[str, State]]:
        for place, number in state[2]:
            message, one = self._orders.values[number], self._process(state, place)
            rest = state[2] - {(place, number)}
            for name, after in self._obey(message, one, may_return=state[3].returns > 0):
                if after.state.epoch < one.state.epoch:
                    raise Violation(f"{name} {one.number}: its epoch goes back")
                processes = list(state[1])
                processes[place] = self._processes.number(after)
                under_way, left = rest, state[3]
                if name == "come again":  # what was sent to its earlier incarnation is not for it
                    under_way, left = frozenset(pair for pair in rest if pair[0] != place), left.less("returns")
                yield f"{name} {one.number}", self._tidy((state[0], tuple(processes), under_way, left))
            if state[3].lost_orders:
                yield f"lose order {one.number}", (*state[:2], rest, state[3].less("lost_orders"))

    def _obey(self, message: object, one: Process, *, may_return: bool) -> Iterator[tuple[str, Process]]:
        match message:
            case Prepare(epoch):
                for stopped in acts.stop(one, epoch, self.work):
                    yield "prepare", stopped
            case Begin():
                yield "begin", acts.begin(one, message, self.work)
            case Follow():
                yield "told to follow", replace(one, source=message)
            case Dismiss() if may_return:
                yield "come again", acts.come_again(one)
            case Finish() if one.state.begin is not None and not one.state.has_ended:
                raise Violation(f"finish {one.number}: told before it has done what follows the last step")
            case Dismiss() | Finish():
                yield "finish", replace(one, is_alive=False)

    def _tidy(self, state: State) -> State:
        """Drop orders that change nothing any more."""
        kept = frozenset(pair for pair in state[2] if self._has_effect(self._orders.values[pair[1]], state, pair[0]))
        return (state[0], state[1], kept, state[3])

    def _has_effect(self, message: object, state: State, place: int) -> bool:
        one = self._process(state, place)
        if not one.is_alive:
            return False
        match message:
            case Prepare(epoch):
                return epoch > one.state.epoch
            case Follow(epoch):
                is_news = one.source is None or one.source.epoch < epoch
                return one.follows and not one.state.epoch and is_news
            case Begin():
                is_over = message.epoch < one.state.epoch
                has_begun = message.epoch == one.state.epoch and one.state.begin is not None
                is_member = one.state.member in {seat.member for seat in message.seats}
                return is_member and not is_over and not has_begun
        return True

    # What indices stand for

    def _coordinator(self, state: State) -> Coordinator:
        found: Coordinator = self._coordinators.values[state[0]]
        return found

    def _process(self, state: State, place: int) -> Process:
        found: Process = self._processes.values[state[1][place]]
        return found

    def _all(self, state: State) -> list[Process]:
        return [self._processes.values[number] for number in state[1]]
