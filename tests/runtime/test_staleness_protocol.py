"""D4: the protocol of bounded staleness, tried in every order of events: 3 workers, 3 steps, every bound."""

from collections import deque
from typing import NamedTuple

import pytest

from ttlaunch.runtime.parallel.staleness.protocol import Clock, ProtocolError, RingPart, Staleness

STEPS = 3


def local_events(clock):
    """What may happen at a worker next, as far as it alone decides, as (name, step, clock after it)."""
    if clock.may_begin and clock.begun < STEPS:
        yield "begin", clock.begun + 1, clock.begin()
    if clock.given < clock.begun:
        yield "give", clock.begun, clock.give()
    if clock.due is not None:
        yield "apply", clock.due, clock.apply()
    if clock.freed < clock.applied:
        yield "free", clock.freed + 1, clock.free()


def arrivals(clock):
    """The means that may become whole at a worker, once everybody has given; the network may bring them in any order."""
    for step in range(clock.applied + 1, clock.given + 1):
        if step not in clock.whole:
            yield "whole", step, clock.complete(step)


class Clocks(dict):
    """Every clock that was met by a number, and its events by number, found once: so that a search is quick."""

    def __init__(self):
        super().__init__()
        self.clocks, self.events = [], []

    def number(self, clock):
        if clock not in self:
            self[clock] = len(self.clocks)
            self.clocks.append(clock)
            self.events.append(None)
        return self[clock]

    def events_of(self, number):
        if self.events[number] is None:
            found = [*local_events(self.clocks[number]), *arrivals(self.clocks[number])]
            self.events[number] = [(name, step, self.number(after)) for name, step, after in found]
        return self.events[number]


def explore(workers, bound):
    """Every world that any order of events leads to, as the clocks of its workers, and whether anything can follow.

    Workers are alike, so worlds that differ only in who is who are tried once.
    """
    known = Clocks()
    first = (known.number(Clock(bound)),) * workers
    seen, waiting, found = {first}, deque([first]), []
    while waiting:
        world = waiting.popleft()
        given = min(known.clocks[number].given for number in world)
        nexts = {
            tuple(sorted((*world[:worker], after, *world[worker + 1 :])))
            for worker, number in enumerate(world)
            for name, step, after in known.events_of(number)
            if name != "whole" or step <= given
        }
        found.append(([known.clocks[number] for number in world], bool(nexts)))
        waiting.extend(nexts - seen)
        seen |= nexts
    return found, known


def check(found, *, bound):
    """Bounds hold in every world, nobody is ever stuck, and the bounds are reached."""
    leads, buffers = {0}, set()
    for clocks, goes_on in found:
        slowest = min(clock.given for clock in clocks)
        leads |= {clock.begun - 1 - slowest for clock in clocks if clock.begun > clock.given}
        buffers |= {len(clock.open_steps) for clock in clocks}
        assert max(clock.applied for clock in clocks) <= slowest
        assert all(0 <= clock.staleness <= bound for clock in clocks if clock.begun)
        assert goes_on == any(clock.freed < STEPS for clock in clocks), clocks
    assert min(bound, STEPS - 1) == max(leads)
    assert min(bound + 1, STEPS) == max(buffers)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_no_order_of_events_breaks_a_bound_or_gets_stuck(bound):
    """D4: 3 workers, 3 steps, every interleaving: lead ≤ K, buffers ≤ K + 1, no deadlock; both bounds are reached."""
    found, known = explore(3, bound)
    check(found, bound=bound)
    for clock in known:  # every mean is applied once, in the order of the steps
        for name, step, after in [*local_events(clock), *arrivals(clock)]:
            assert (step if name == "apply" else clock.applied) == after.applied
            assert after.applied - clock.applied == (name == "apply")


class Rings(NamedTuple):
    """Every worker's clock, and its part in every step's all-reduce."""

    clocks: tuple[Clock, ...]
    parts: tuple[tuple[RingPart, ...], ...]

    def after(self, worker, clock, step=1, part=None):
        mine = put(self.parts[worker], step - 1, part or self.parts[worker][step - 1])
        return Rings(put(self.clocks, worker, clock), put(self.parts, worker, mine))


def put(values, at, value):
    return (*values[:at], value, *values[at + 1 :])


def ring_worlds(world):
    """The worlds after every event, where a mean is whole only when its messages have been taken one by one."""
    for worker, clock in enumerate(world.clocks):
        for name, step, after in local_events(clock):
            given = world.parts[worker][step - 1].give() if name == "give" else None
            yield world.after(worker, after, step, given)
        for _, step, after in arrivals(clock):
            part, before = world.parts[worker][step - 1], world.parts[worker - 1][step - 1]
            if part.is_whole:
                yield world.after(worker, after)
            elif before.sendable > part.received:
                yield world.after(worker, clock, step, part.receive())


@pytest.mark.parametrize(("workers", "bound"), [(2, 0), (2, 1), (3, 0)])
def test_the_same_with_every_message_of_the_rings(workers, bound):
    """D4: that a mean comes once everybody has given, in any order, is what rings do."""
    parts = tuple(tuple(RingPart(place, workers) for _ in range(STEPS)) for place in range(workers))
    first = Rings((Clock(bound),) * workers, parts)
    seen, waiting, found = {first}, deque([first]), []
    while waiting:
        world = waiting.popleft()
        nexts = set(ring_worlds(world))
        found.append((world.clocks, bool(nexts)))
        waiting.extend(nexts - seen)
        seen |= nexts
    check(found, bound=bound)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_ring_adds_every_vector_once_in_every_order_of_messages(workers):
    """D6: each shard ends as the sum over all workers, everywhere; each sends 2(W - 1) messages and none but to the next."""
    first = tuple(RingPart(place, workers) for place in range(workers))
    sums = tuple(tuple(frozenset({place}) for _ in range(workers)) for place in range(workers))
    seen, waiting = {(first, sums)}, [(first, sums)]
    ends = set()
    while waiting:
        parts, shards = waiting.pop()
        nexts = list(ring_events(parts, shards))
        if not nexts:
            ends.add(shards)
        for world in nexts:
            if world not in seen:
                seen.add(world)
                waiting.append(world)
    whole = frozenset(range(workers))
    assert all(part.own_shard == part.shard_to_send(workers - 1) for part in first)  # sent on as it was completed
    assert {((whole,) * workers,) * workers} == ends


def ring_events(parts, shards):
    """A vector is given, or a message is taken: the shard as the worker before had it when it sent it."""
    workers = len(parts)
    for place, part in enumerate(parts):
        if not part.has_own:
            yield put(parts, place, part.give()), shards
        elif part.may_receive and parts[place - 1].sendable > part.received:
            shard = part.shard_to_receive(part.received)
            assert shard == parts[place - 1].shard_to_send(part.received)
            brought = contributors(place - 1, part.received, shard, workers)
            mine = shards[place][shard]
            assert not part.is_adding or not (mine & brought), "a vector would be added twice"
            after = mine | brought if part.is_adding else brought
            yield put(parts, place, part.receive()), put(shards, place, put(shards[place], shard, after))


def contributors(place, hop, shard, workers):
    """Whose vectors are in message `hop` of a worker: those the shard has passed, all of them on its second way round."""
    return frozenset((shard + way) % workers for way in range(min(hop + 1, workers)))


def test_events_out_of_turn_are_refused():
    clock = Clock(1)
    for wrong in (clock.give, clock.apply, clock.free, lambda: clock.complete(1), lambda: clock.begin().begin()):
        with pytest.raises(ProtocolError):
            wrong()
    for wrong in (
        clock.begin().free,
        clock.begin().give().complete(1).free,
        clock.begin().give().complete(1).begin().apply().begin,
    ):
        with pytest.raises(ProtocolError):
            wrong()
    led = clock.begin().give().begin().give()
    assert not led.may_begin  # bug 13: it waits only now, for the slowest, and doesn't crash
    assert led.complete(1).apply().free().may_begin
    assert not led.complete(2).may_begin


def test_a_clock_goes_on_from_a_checkpoint():
    clock = Clock.after(7, bound=2).begin()
    assert (8, range(8, 9), 0) == (clock.begun, clock.open_steps, clock.staleness)


def test_staleness_is_counted_once_for_each_gradient_and_not_for_each_look():
    """Bug 14: looking doesn't count; an oracle recounts from the order of events."""
    events = "begin begin-blocked give begin give whole1 whole1-look apply free begin give whole3 whole2 apply apply"
    clock, updates, found = Clock(1), 0, []
    statistics = Staleness()
    ages = {}
    for event in events.split():
        if event == "begin":
            clock = clock.begin()
            ages[clock.begun] = clock.begun - 1 - updates  # the oracle's: updates seen so far
            assert ages[clock.begun] == clock.staleness
        elif event == "give":
            found.append(clock.staleness)
            clock = clock.give()
        elif event == "apply":
            clock, updates = clock.apply(), updates + 1
            statistics.count(found[updates - 1])
        elif event == "free":
            clock = clock.free()
        elif event.startswith("whole") and "-" not in event:
            clock = clock.complete(int(event[5:]))
        for _ in range(5):  # polls
            assert clock.due in {None, clock.applied + 1}
    assert (3, 2, 2, 1) == (statistics.gradients, statistics.stale, statistics.total, statistics.maximum)
    assert [0, 1, 1] == list(ages.values()) == found
    assert 2 / 3 == statistics.average
    assert 0.0 == Staleness().average
