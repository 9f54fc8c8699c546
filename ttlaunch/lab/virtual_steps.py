"""Steps of an elastic run on a virtual clock that all members make together, or of their own until they agree.

    kill      ... step 6 |#kill ~~~ noticed ~ all have answered | what nobody has any more | exchange | step 8 ...
    join      ... step 6 | step 7 | step 8 |       the joiner starts, gets the state after step 7 and the mean gradient of step 8,
                                     step 9 # all have answered | the rest of step 9, with the joiner | step 10 ...

A step is the plain one of as many workers: each computes its micro-batches, then they exchange and update. In the first step of an epoch
they compute what the coordinator has divided, and the rest of the step takes as long as ever. What workers get from one another is in
`lab/virtual_gifts.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ttlaunch.lab.virtual_gifts import equal_parts, gifts_at, has_slots
from ttlaunch.lab.virtual_members import VirtualMembers
from ttlaunch.membership import worker
from ttlaunch.membership.messages import Begin
from ttlaunch.membership.numbered import changed
from ttlaunch.membership.worker import Leaves
from ttlaunch.spec.recipe.blocks import aligned_subtrees

_ATTEMPTS = 5  # to get a state that is not too old, as in a run


@dataclass
class _Making:
    """A step that members make.

    Attributes:
        begin: The order with which the epoch began.
        starts: When each begins to compute.
        todo, kept: The micro-batches that each computes, and those whose sums it has.
        exchange_s: How long the step goes on after the last of them has computed its micro-batches.
        tries: How often its end was put off, since somebody was stopped.
    """

    step: int
    begin: Begin
    starts: dict[int, float]
    todo: Mapping[int, Sequence[Leaves]]
    kept: Mapping[int, Sequence[Leaves]]
    exchange_s: float = 0.0
    is_done: bool = False
    is_stopped: bool = False
    tries: int = 0

    @property
    def members(self) -> tuple[int, ...]:
        """Their numbers, in the order of their places."""
        return self.begin.numbers


class StepsTogether:
    """The steps of members that wait for each other in each of them, or where they agree."""

    def __init__(self, members: VirtualMembers) -> None:
        """Wait for the first epoch."""
        self._members, self._limits, self._costs = members, members.limits, members.costs
        self._last_step = members.total_steps
        self._making: dict[int, _Making] = {}  # by number: the step that each is in
        self._missed: dict[int, int] = {}  # steps of their own that others have made while this one was stopped
        self._after_step: list[tuple[int, Callable[[], None]]] = []

    def applied_at_start(self, number: int) -> int:
        """All workers draw the same weights."""
        del number
        return 0

    def usual_s(self, number: int) -> None:
        """Each reports steps of the run."""
        del number

    def begin(self, begin: Begin, at_s: float) -> None:
        """Let members get what they lack, and make the epoch's first step."""
        processes, epochs = self._members.processes, self._members.epochs
        todo, kept = (dict(zip(begin.numbers, rows, strict=True)) for rows in (begin.todo, begin.kept))
        if self._limits.has_local_steps and len(epochs) == 1:
            # Later, members have made the step that they were asked to end.
            todo = {number: (block,) for number, block in zip(begin.numbers, begin.blocks, strict=True)}
        if len(epochs) > 1:
            epochs[-1].computed_anew = sum(stop - first for rows in begin.todo for first, stop in rows)
            epochs[-1].lost_steps = self._count_lost(epochs[-2].members, begin)
        starts = self._give(begin, at_s)
        for number in begin.numbers:
            process = processes[number]
            process.state = worker.begin(process.state, begin)
            if self._limits.slots is not None and has_slots(self._limits):
                process.state = worker.with_slots(process.state, begin, slots=self._limits.slots)
            elif process.state.applied != begin.applied:
                process.state = worker.catch_up(process.state)
        if begin.applied >= self._last_step:
            self._members.at(max(starts.values()), lambda: self._report(begin, begin.applied))
            return
        making = _Making(begin.applied + 1, begin, starts, todo, kept)
        if all(map(self._members.hears, begin.numbers)):  # one that is cut off never hears of the epoch
            self._make(making)

    def stop(self, number: int) -> float:
        """Let a member stop after the micro-batch that it computes; returns when, and notes the sums that it has then."""
        now, making = self._members.now, self._making.pop(number, None)
        if making is None or making.is_done:
            return now
        making.is_stopped = True
        leaf_s, start_s = self._costs.leaf_s(number), making.starts[number]
        todo = [leaf for first, stop in making.todo[number] for leaf in range(first, stop)]
        done = min(len(todo), max(0, math.ceil((now - start_s) / leaf_s - 1e-9)))
        if self._limits.has_local_steps:  # nobody throws away a step of its own
            return max(now, start_s + len(todo) * leaf_s)
        has = {leaf for first, stop in making.kept[number] for leaf in range(first, stop)} | set(todo[:done])
        # Where all own slots, layers give their gradients away at once, and no sums of a whole step are kept.
        keeps = not (has_slots(self._limits) and self._limits.slots == 0)
        process = self._members.processes[number]
        process.state = worker.hold(process.state, tuple(_nodes_of(has)) if keeps else ())
        return max(now, start_s + done * leaf_s) if done else now

    def go_on(self, number: int, since_s: float) -> None:
        """Let a member make the rest of its step, after the steps of their own that others have made meanwhile."""
        process, now = self._members.processes[number], self._members.now
        making, missed = self._making.get(number), self._missed.pop(number, 0)
        if making is not None and not (making.is_done or making.is_stopped):
            began_s = making.starts[number]
            first, stop = making.begin.blocks[making.members.index(number)]
            missed_s = missed * (stop - first) * self._costs.leaf_s(number)
            making.starts[number] = missed_s + (now if began_s >= since_s else began_s + now - since_s)
            self._plan_end(making)
        for _ in range(missed):
            process.state = worker.end_step(worker.apply(process.state))

    def follow(self, number: int, members: Sequence[int]) -> None:
        """Get the state after the step that is being made, and then what is missing."""
        process = self._members.processes[number]
        process.attempts += 1
        step = min(self._last_step, self._members.steps_done + 1)

        def ask() -> None:
            parts = equal_parts(self._costs.state_bytes, members)
            taken_s = self._costs.transfers_s({number: parts})[number] + self._costs.leaf_s(number)
            self._members.at(self._members.now + taken_s, lambda: self._members.let(number, take))

        def take() -> None:
            if process.state.epoch == 0:
                process.count(self._costs.state_bytes, is_mean=False)
                process.state = changed(process.state, applied=step)
                self._catch_up(number, members)

        self._after_step.append((step, ask))

    def _catch_up(self, number: int, members: Sequence[int]) -> None:
        """Apply the mean gradients of the steps that others have made meanwhile; then say that this worker can take part."""
        process = self._members.processes[number]
        applied, steps_done = process.state.applied, self._members.steps_done
        if applied is None or process.state.epoch:
            return
        if steps_done - applied > self._costs.most_means:
            process.state = changed(process.state, applied=None)
            if process.attempts < _ATTEMPTS:
                self.follow(number, members)
            else:
                self._members.register(number, None, follows=False)
        elif steps_done > applied:
            process.count(self._costs.mean_bytes, is_mean=True)
            process.state = changed(process.state, applied=applied + 1)
            taken_s = self._costs.transfers_s({number: equal_parts(self._costs.mean_bytes, members)})[number]
            again = partial(self._members.let, number, lambda: self._catch_up(number, members))
            self._members.at(self._members.now + taken_s, again)
        else:
            self._members.register(number, applied, follows=True)

    def _count_lost(self, before: Sequence[int], begin: Begin) -> int:
        """Return how many steps of their own, since they last agreed, go with members that take part no more."""
        gone = set(before).difference(begin.numbers)
        return sum(self._members.processes[number].reported % self._costs.every for number in gone)

    def _give(self, begin: Begin, at_s: float) -> dict[int, float]:
        """Let members get what they lack; returns when each has it."""
        starts = dict.fromkeys(begin.numbers, at_s)
        states = {number: self._members.processes[number].state for number in begin.numbers}
        gifts = gifts_at(begin, states, limits=self._limits, costs=self._costs)
        times = self._costs.transfers_s({number: one.sizes for number, one in gifts.items()})
        for number, gift in gifts.items():
            process = self._members.processes[number]
            process.count(round(sum(gift.sizes.values())), is_mean=gift.is_mean)
            process.ready_s = self._members.now if process.ready_s is None else process.ready_s
            starts[number] += times[number]
        return starts

    def _agrees(self, making: _Making) -> bool:
        return making.step % self._costs.every == 0 or making.step == self._last_step

    def _step_s(self, making: _Making) -> float:
        return self._costs.step_s(making.members, agrees=self._agrees(making))

    def _make(self, making: _Making) -> None:
        """Let the members make a step."""
        for number in making.members:
            self._making[number] = making
        longest_s = max(
            (stop - first) * self._costs.leaf_s(one)
            for one, (first, stop) in zip(making.members, making.begin.blocks, strict=True)
        )
        making.exchange_s = self._step_s(making) - longest_s
        self._plan_end(making)

    def _plan_end(self, making: _Making) -> None:
        """Let a step end when all have computed their micro-batches, and exchanged the sums."""
        making.tries += 1
        tries = making.tries
        computed_s = max(
            making.starts[one] + _count_leaves(making.todo[one]) * self._costs.leaf_s(one) for one in making.members
        )
        at_s = max(self._members.now, computed_s + making.exchange_s)
        self._members.at(at_s, lambda: self._end_step(making, tries))

    def _end_step(self, making: _Making, tries: int) -> None:
        processes = self._members.processes
        absent = [number for number in making.members if not processes[number].acts]
        is_missing = making.is_stopped or (absent and not self._is_made_alone(making, absent))
        if is_missing or tries != making.tries:
            return  # some of it is missing, or it ends later
        making.is_done, begin = True, making.begin
        self._members.note_step(making.step, usual_s=self._step_s(making))
        for number in making.members:
            process = processes[number]
            if number in absent:
                self._missed[number] = self._missed.get(number, 0) + 1
                continue
            process.state = worker.end_step(worker.apply(process.state))
            self._members.note_reported(number, making.step)
        blocks = {number: (block,) for number, block in zip(begin.numbers, begin.blocks, strict=True)}
        nothing: Mapping[int, Sequence[Leaves]] = dict.fromkeys(begin.numbers, ())
        if making.step < self._last_step:
            starts = dict.fromkeys(begin.numbers, self._members.now)
            self._make(_Making(making.step + 1, begin, starts, blocks, nothing))
        for step, deed in [one for one in self._after_step if one[0] <= making.step]:
            self._after_step.remove((step, deed))
            deed()
        # Before the last report: a worker that ends then has not done what follows the last step.
        self._members.on_step()
        self._report(begin, making.step)

    def _is_made_alone(self, making: _Making, absent: Sequence[int]) -> bool:
        """Whether members make a step without some of them: one of their own, after which they do not agree."""
        return self._limits.has_local_steps and not self._agrees(making) and len(absent) < len(making.members)

    def _report(self, begin: Begin, step: int) -> None:
        for number in begin.numbers:
            process = self._members.processes[number]
            if step >= self._last_step and process.state.begin is begin:
                process.state = worker.end_run(process.state)
            self._members.report(number)


def _count_leaves(rows: Sequence[Leaves]) -> int:
    return sum(stop - first for first, stop in rows)


def _nodes_of(leaves: set[int]) -> list[Leaves]:
    """Return the largest nodes of the tree that these micro-batches make up."""
    rows: list[range] = []
    for leaf in sorted(leaves):
        rows[-1:] = (
            [range(rows[-1].start, leaf + 1)] if rows and rows[-1].stop == leaf else [*rows[-1:], range(leaf, leaf + 1)]
        )
    return [(node.start, node.stop) for row in rows for node in aligned_subtrees(row)]
