"""What the coordinator orders where the state is cut into slots that not every member has."""

from dataclasses import replace

import pytest

from tests.membership.test_coordinator import begin_of
from ttlaunch.membership.coordinator import step
from ttlaunch.membership.coordinator_state import Coordinator, Phase, Terms
from ttlaunch.membership.messages import (
    Answered,
    Begin,
    LeaveAsked,
    Lost,
    Member,
    Order,
    Progressed,
    Registered,
    Seat,
    Share,
    order_from_json,
    order_to_json,
)
from ttlaunch.membership.slots import divide_slots
from ttlaunch.records.parser import BadRecord


class Run:
    """A coordinator and members that have what their places give them."""

    def __init__(self, hosts, *, minimum=1, micro_batches=8, slots=0, servers=0):
        terms = Terms(minimum, len(hosts), micro_batches, frozenset(range(len(hosts))), slots=slots, servers=servers)
        self.state = Coordinator(terms)
        self.orders = []
        first = divide_slots(hosts, slots=slots)
        self.shares = {number: (first.of(number),) for number in range(len(hosts))}
        for number, host in enumerate(hosts):
            self.feed(Registered(Seat(Member(number, 0), host), 0))
        self.begin = self.answer()

    def feed(self, event):
        self.state, self.orders = step(self.state, event)
        return self.orders

    def answer(self, applied=0, ready=()):
        for number in self.state.members:
            one = applied[number] if isinstance(applied, dict) else applied
            shares = () if one is None else self.shares.get(number, ())
            member = self.state.workers[number].seat.member
            rest = {"validated": one, "shares": shares, "is_ready": number in ready}
            self.feed(Answered(member, self.state.epoch, one, **rest))
        begins = {order.message for order in self.orders if isinstance(order.message, Begin)}
        return begins.pop() if begins else None

    def go_on(self, applied):
        """All members have got their slots and report a step."""
        slots = divide_slots([seat.host for seat in self.state.begin.seats], slots=self.state.terms.slots)
        self.shares = {number: (slots.of(place),) for place, number in enumerate(self.state.begin.numbers)}
        for number in self.state.members:
            self.feed(Progressed(Member(number, 0), self.state.epoch, applied))

    def lose(self, *numbers):
        for number in numbers:
            self.feed(Lost(Member(number, 0)))


def test_the_begin_says_what_each_member_has():
    run = Run(["a", "a", "b"])
    assert tuple(divide_slots(["a", "a", "b"]).of(place) for place in range(3)) == run.begin.shares


def test_the_shadow_of_a_lost_owner_has_its_slot():
    run = Run(["a"] * 3)
    run.lose(1)
    begin = run.answer(applied=5)
    assert (5, (0, 2), (0, 2)) == (begin.applied, begin.numbers, begin.holders)
    assert {0, 1, 2} == {slot for share in begin.shares for slot in share.slots}


def test_members_that_are_ready_for_the_largest_step_count_as_if_they_had_made_it():
    run = Run(["a"] * 3)
    run.lose(1)
    begin = run.answer(applied={0: 6, 2: 5}, ready={2})
    assert (6, (0,), ((2, 5),)) == (begin.applied, begin.holders, begin.behind)
    assert run.shares[2][0] == begin.shares[1]


def test_a_step_that_nobody_has_made_is_made_again_although_all_are_ready():
    run = Run(["a"] * 3)
    run.lose(1)
    assert run.answer(applied=5, ready={0, 2}).applied == 5


def test_owner_and_shadow_gone_together_strand_the_run_and_it_knows_why():
    run = Run(["a"] * 4)
    run.go_on(3)
    run.lose(1, divide_slots(["a"] * 4).shadows[1])
    assert run.answer(applied=3) is None
    assert (Phase.STRANDED, True) == (run.state.phase, run.state.lacks_slots)


def test_an_owner_and_the_shadow_of_another_slot_may_be_gone_together():
    run = Run(["a", "a", "a", "a"])
    run.go_on(3)
    run.lose(0, 2)
    assert run.answer(applied=3).numbers == (1, 3)


def test_a_joiner_has_nothing_of_the_cut_from_which_it_pulls():
    run = Run(["a"] * 2)
    run.lose(1)
    run.answer(applied=4)
    run.go_on(5)
    run.feed(Registered(Seat(Member(2, 0), "a"), None))
    begin = run.answer(applied={0: 5, 2: None})
    assert (Share(1, (0,)), Share(1)) == begin.shares


def test_neighbours_that_leave_together_go_one_after_the_other():
    run = Run(["a"] * 4)
    run.go_on(2)
    shadow = divide_slots(["a"] * 4).shadows[1]
    run.feed(LeaveAsked(1)), run.feed(LeaveAsked(shadow))
    begin = run.answer(applied=2)
    assert len(begin.numbers) == 3
    run.go_on(3)
    last = run.answer(applied=3)
    assert {0, 1, 2, 3} - {1, shadow} == set(last.numbers)


def test_servers_compute_nothing_and_a_shadow_keeps_its_place():
    run = Run(["a", "a", "b", "b"], slots=1, servers=2)
    assert ((0, 0), (0, 0), (0, 4), (4, 8)) == run.begin.blocks
    run.go_on(1)
    run.lose(0)
    begin = run.answer(applied=1)
    assert (2, 1, 3) == begin.numbers, "the new owner is on another host than the shadow"
    assert ((), (), ((0, 8),)) == begin.todo


def test_two_members_of_a_run_with_two_servers_are_an_owner_and_one_that_computes():
    run = Run(["a", "a", "b"], slots=1, servers=2)
    run.lose(2)
    begin = run.answer(applied=1)
    assert (((0, 0), (0, 8)), (0, 1)) == (begin.blocks, begin.numbers)


def test_an_order_with_shares_survives_the_way_as_json():
    begin = Run(["a", "b", "b"]).begin
    assert Order((Member(1, 0),), begin) == order_from_json(order_to_json(Member(1, 0), begin).encode())


@pytest.mark.parametrize("shares", [(Share(3, (3,)),) * 3, (Share(0),) * 3, (Share(3, (0,)),) * 2])
def test_shares_that_cannot_be_are_no_order(shares):
    begin = Run(["a"] * 3).begin
    wrong = replace(begin, shares=shares)
    assert isinstance(order_from_json(order_to_json(Member(0, 0), wrong).encode()), BadRecord)


def test_a_state_that_is_not_cut_has_no_shares():
    state = Coordinator(Terms(1, 2, 4, frozenset({0})))
    state, orders = step(state, Registered(Seat(Member(0, 0)), 0))
    state, orders = step(state, Answered(Member(0, 0), 1, 0, validated=0))
    assert begin_of(orders).shares == ()
