"""Steps of an elastic run on a virtual clock of which the fastest member may lead the slowest by some.

    member 0   step 8 | step 9 | step 10 | waits until the mean of step 8 is there, with a clock gap of 2 at most
    member 1   step 8          | step 9            | ...
    a change   all stop after the micro-batch that they compute | who lacks a step that another one has applied gets the state |
               each computes its new part of all steps again that it has begun and not applied

The mean of a step is there when all members have given their parts and these have travelled, after those of the step before. A
member applies it at the end of the step that it then computes, as in `runtime/parallel/staleness/elastic_exchange.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ttlaunch.lab.virtual_gifts import equal_parts
from ttlaunch.lab.virtual_members import VirtualMembers
from ttlaunch.lab.virtual_passes import Passes
from ttlaunch.lab.virtual_processes import ring_s
from ttlaunch.membership import worker
from ttlaunch.membership.messages import Begin


@dataclass
class _Leader:
    """How far a member is.

    Attributes:
        begun: The last step that it has begun, in any epoch.
        step: The step that it computes or has computed last, in this epoch.
        done: How many micro-batches of it are done.
        waits: Whether it has given all that it has begun, and waits for a mean.
    """

    begun: int = 0
    step: int = 0
    done: int = 0
    waits: bool = False


class StepsAhead:
    """The steps of members that need not wait for each other at once."""

    def __init__(self, members: VirtualMembers, *, clock_gap: int) -> None:
        """Wait for the first epoch; step s + 1 begins when the means of all steps up to s - `clock_gap` are applied."""
        self._members, self._costs, self._clock_gap = members, members.costs, clock_gap
        self._last_step = members.total_steps
        self._passes = Passes(members)
        self._leaders: dict[int, _Leader] = {}
        self._given: dict[int, set[int]] = {}  # by step: the members that have given their parts in this epoch
        self._there_s: dict[int, float] = {}  # by step: when its mean is there
        self._exchange_s = self._update_s = 0.0  # of this epoch, see `_measure`

    def applied_at_start(self, number: int) -> int:
        """All workers draw the same weights."""
        del number
        return 0

    def usual_s(self, number: int) -> None:
        """Each reports steps of the run."""
        del number

    def follow(self, number: int, members: Sequence[int]) -> None:
        """Nobody keeps a mean for one that comes, so no coordinator orders it."""
        raise AssertionError(f"worker {number} was ordered to follow {members}")

    def begin(self, begin: Begin, at_s: float) -> None:
        """Let members get the state that they lack, and compute again what they have begun and not applied."""
        processes, epochs, behind = self._members.processes, self._members.epochs, dict(begin.behind)
        if len(epochs) > 1:
            epochs[-1].computed_anew = sum(stop - first for rows in begin.todo for first, stop in rows)
        self._leaders = {number: self._leaders.get(number, _Leader()) for number in begin.numbers}
        self._given, self._there_s = {}, {}
        self._measure(begin)
        parts = equal_parts(self._costs.state_bytes, begin.holders)
        times = self._costs.transfers_s(dict.fromkeys(behind, parts))
        for number in filter(self._members.hears, begin.numbers):  # one that is cut off never hears of the epoch
            process = processes[number]
            process.state = worker.begin(process.state, begin)
            if number in behind:
                process.count(self._costs.state_bytes, is_mean=False)
                process.state = worker.catch_up(process.state)
            self._members.act_at(at_s + times.get(number, 0.0), number, partial(self._resume, number))

    def stop(self, number: int) -> float:
        """Let a member stop after the micro-batch that it computes, which counts for nothing."""
        stopped_s, _ = self._passes.stop(number)
        if number in self._leaders:
            self._leaders[number].waits = False
        return stopped_s

    def go_on(self, number: int, since_s: float) -> None:
        """Let a member compute the rest of its micro-batch, or look again for the mean that it waits for."""
        self._passes.go_on(number, since_s)
        self._look_again(number)

    def _measure(self, begin: Begin) -> None:
        """Find out how long the parts of a step travel, and how long a member takes for an update.

        If the ring (`ring_s`) is hidden behind the micro-batches, what else a step of members that stay takes is the update; otherwise
        steps take as long as messages.
        """
        numbers, travels_s = begin.numbers, ring_s(self._costs, begin.numbers)
        step_s = self._costs.step_s(numbers, agrees=True)
        longest_s = max(
            (stop - first) * self._costs.leaf_s(number)
            for number, (first, stop) in zip(numbers, begin.blocks, strict=True)
        )
        is_hidden = travels_s < longest_s
        self._exchange_s = travels_s if is_hidden else step_s
        self._update_s = max(0.0, step_s - longest_s) if is_hidden else 0.0

    # What members do

    def _resume(self, number: int) -> None:
        """Begin the first step that is not in the weights."""
        one, applied = self._leaders[number], self._members.processes[number].state.applied
        assert applied is not None  # noqa: S101 - it has got the state
        if applied >= self._last_step:
            self._members.end_run(number)
            return
        one.step, one.done, one.waits = applied + 1, 0, False
        one.begun = max(one.begun, one.step)
        self._compute(number)

    def _compute(self, number: int) -> None:
        self._passes.compute(number, partial(self._end_micro_batch, number))

    def _end_micro_batch(self, number: int) -> None:
        newest, one = self._members.newest, self._leaders.get(number)
        if one is None or newest is None or self._members.processes[number].state.begin is not newest:
            return  # the others have gone on without it
        first, stop = newest.blocks[newest.places[number]]
        one.done += 1
        if one.done < stop - first:
            self._compute(number)
        else:
            self._members.act_at(self._members.now + self._update_s, number, partial(self._give, number))

    def _give(self, number: int) -> None:
        """Give this member's part of a step away, and go on with the next one that it has begun, or look for means."""
        one, now = self._leaders[number], self._members.now
        given = self._given.setdefault(one.step, set())
        given.add(number)
        if given == self._leaders.keys():
            self._there_s[one.step] = max(now, self._there_s.get(one.step - 1, now)) + self._exchange_s
            self._members.at(self._there_s[one.step], self._look_all_again)
        if one.step < one.begun:
            one.step, one.done = one.step + 1, 0
            self._compute(number)
        else:
            one.waits = True
            self._look_again(number)

    def _look_all_again(self) -> None:
        for number in list(self._leaders):
            self._look_again(number)

    def _look_again(self, number: int) -> None:
        """Apply the means that are there; then begin the next step, unless too many are missing."""
        one, process = self._leaders.get(number), self._members.processes[number]
        if one is None or not one.waits or not process.acts or process.state.begin is not self._members.newest:
            return
        while self._there_s.get(self._applied(number) + 1, self._members.now + 1) <= self._members.now:
            self._apply(number)
        missing = one.step - self._applied(number)
        if missing > (0 if one.step == self._last_step else self._clock_gap):
            return
        one.waits = False
        self._members.note_reported(number, one.step)
        self._members.report(number)
        self._members.on_step()
        # What follows comes after faults of this step, which may end or stop the member.
        if one.step == self._last_step:
            self._members.act_at(self._members.now, number, partial(self._members.end_run, number))
        else:
            one.step, one.begun, one.done = one.step + 1, one.step + 1, 0
            self._members.act_at(self._members.now, number, partial(self._compute, number))

    def _applied(self, number: int) -> int:
        return self._members.processes[number].state.applied or 0

    def _apply(self, number: int) -> None:
        process, step = self._members.processes[number], self._applied(number) + 1
        process.state = worker.end_step(worker.apply(process.state))
        if step > self._members.steps_done:
            self._members.note_step(step, usual_s=self._costs.step_s(self._members.epochs[-1].members, agrees=True))
