"""From events that a coordinator takes at once follows what follows from one after the other, whatever they are."""

from hypothesis import given, settings
from hypothesis import strategies as draw

from ttlaunch.membership.coordinator import step
from ttlaunch.membership.coordinator_state import Coordinator, Terms
from ttlaunch.membership.messages import (
    Answered,
    CutOff,
    EndOrdered,
    LeaveAsked,
    Lost,
    Member,
    Progressed,
    Registered,
    Seat,
    Share,
    Tick,
)

NUMBERS = draw.integers(0, 3)
TERMS = draw.builds(
    Terms,
    minimum=draw.integers(1, 2),
    maximum=draw.integers(2, 4),
    micro_batches=draw.just(8),
    first=draw.sampled_from([frozenset({0}), frozenset({0, 1}), frozenset({0, 1, 2})]),
    slots=draw.sampled_from([None, None, 0]),
    servers=draw.integers(0, 1),
    has_local_steps=draw.booleans(),
)


@draw.composite
def next_events(draws, state):
    """Some events in a row: often what a member of this epoch reports, and sometimes what a lost one does, or of another epoch."""
    kinds = ["answer", "answer", "answer", "progress", "progress", "progress", "register", "other"]
    number = draws(draw.one_of(NUMBERS, draw.sampled_from(state.members or (0,))))
    known = state.workers.get(number)
    member = known.seat.member if known and draws(draw.integers(0, 4)) else Member(number, draws(draw.integers(0, 1)))
    epoch = state.epoch - (draws(draw.integers(0, 7)) == 0)
    applied = draws(draw.sampled_from([None, 0, 1, 2, 2, 3]))
    is_done = draws(draw.integers(0, 3)) == 0
    match draws(draw.sampled_from(kinds)):
        case "answer":
            held = draws(draw.sampled_from([(), ((0, 2),), ((2, 3), (4, 8))]))
            share = () if state.terms.slots is None else (Share(2, (number % 2,)),)
            return Answered(member, epoch, applied, held, applied, is_done, share, draws(draw.booleans()))
        case "progress":
            return Progressed(member, epoch, applied or 0, draws(draw.sampled_from([None, 0.1, 0.4])), is_done)
        case "register":
            return Registered(Seat(member, draws(draw.sampled_from("ab"))), applied, draws(draw.booleans()))
    return draws(
        draw.sampled_from([Lost(member), LeaveAsked(number), CutOff(member, epoch, applied), EndOrdered(), Tick()])
    )


def ready(terms):
    """A coordinator whose first workers are ready."""
    return step(Coordinator(terms), *(Registered(Seat(Member(number, 0)), 0) for number in sorted(terms.first)))[0]


def begun(terms):
    """A coordinator whose first workers have begun to make steps, if they are enough."""
    state = ready(terms)
    shares = [] if terms.slots is None else [(Share(len(state.members), (number,)),) for number in state.members]
    answers = (
        Answered(Member(number, 0), 1, 0, (), 0, shares=shares[number] if shares else ()) for number in state.members
    )
    return step(state, *answers)[0]


@settings(max_examples=300, deadline=None)
@given(draw.data())
def test_what_follows_is_the_same_at_once_and_one_after_the_other(data):
    first = state = data.draw(draw.sampled_from([ready, begun, begun]))(data.draw(TERMS))
    events, orders = [], []
    for _ in range(data.draw(draw.integers(1, 30))):
        events.append(data.draw(next_events(state)))
        state, more = step(state, events[-1])
        orders += more
    assert (state, orders) == step(first, *events)


def test_a_member_answers_twice_before_the_last_one_does_and_again_when_it_was_let_go():
    terms = Terms(1, 4, 8, frozenset({0, 1}))
    first, _ = step(ready(terms), LeaveAsked(0))
    said = [Answered(Member(0, 0), 1, applied, validated=applied) for applied in (1, 2)]
    events = [*said, Answered(Member(1, 0), 1, 2, validated=2), said[1], Progressed(Member(1, 0), 1, 3)]
    state, orders = step(first, *events)
    assert ["Dismiss", "Begin", "Dismiss"] == [type(order.message).__name__ for order in orders]
    assert (2, 3) == (state.begin.applied, state.workers[1].applied)
    one = first
    for event in events:
        one, _ = step(one, event)
    assert one == state
