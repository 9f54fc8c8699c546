"""What the coordinator orders, event by event."""

from dataclasses import replace

import pytest

from ttlaunch.membership.coordinator import step
from ttlaunch.membership.coordinator_state import Coordinator, Phase, Terms
from ttlaunch.membership.messages import (
    Answered,
    Begin,
    Dismiss,
    EndOrdered,
    Finish,
    Follow,
    LeaveAsked,
    Lost,
    Member,
    Order,
    Prepare,
    Progressed,
    Registered,
    Seat,
    Tick,
    order_from_json,
    order_to_json,
    orders_to_json,
)
from ttlaunch.records.parser import BadRecord


class Run:
    """A coordinator and workers that answer as they are told to."""

    def __init__(self, count=3, *, minimum=1, maximum=4, micro_batches=4):
        self.state = Coordinator(Terms(minimum, maximum, micro_batches, frozenset(range(count))))
        self.orders = []

    def feed(self, event):
        self.state, orders = step(self.state, event)
        self.orders += orders
        return orders

    def register(self, number, incarnation=0, applied=0):
        return self.feed(Registered(Seat(Member(number, incarnation)), applied))

    def follow(self, number, applied=None):
        return self.feed(Registered(Seat(Member(number, 0)), applied, follows=True))

    def answer(self, applied=0, held=None, **more):
        """All members answer; returns the orders that follow the last."""
        orders = []
        for number in self.state.members:
            member = self.state.workers[number].seat.member
            one = applied[number] if isinstance(applied, dict) else applied
            orders = self.feed(Answered(member, self.state.epoch, one, (held or {}).get(number, ()), one, **more))
        return orders

    def begun(self, count=3, **terms):
        for number in range(count):
            self.register(number)
        self.answer()
        assert self.state.phase is Phase.RUNNING
        return self


def begin_of(orders):
    [message] = {order.message for order in orders if isinstance(order.message, Begin)}
    return message


def told(orders, kind=object):
    """The numbers of those that get an order of this kind."""
    return [member.number for order in orders if isinstance(order.message, kind) for member in order.to]


def test_the_first_epoch_begins_when_the_last_of_the_first_workers_is_ready():
    run = Run()
    assert not run.register(2)
    assert not run.register(0)
    assert [Order((Member(0, 0), Member(1, 0), Member(2, 0)), Prepare(1))] == run.register(1)
    begin = begin_of(run.answer())
    assert ((0, 1, 2), 0, ((0, 2), (2, 3), (3, 4))) == (begin.numbers, begin.applied, begin.blocks)


def test_a_first_worker_that_ends_before_it_is_ready_is_not_waited_for():
    run = Run()
    run.register(0), run.register(1)
    run.feed(Lost(Member(2, 0)))
    assert (0, 1) == begin_of(run.answer()).numbers


def test_after_a_loss_the_others_keep_what_they_have_and_divide_the_rest():
    run = Run().begun()
    assert [0, 1] == told(run.feed(Lost(Member(2, 0))))
    begin = begin_of(run.answer(held={0: ((0, 2),), 1: ((2, 3),)}))
    assert (((0, 2),), ((2, 3),)) == begin.kept
    assert (((3, 4),), ()) == begin.todo


def test_the_epoch_starts_from_the_largest_step_and_names_who_lacks_it():
    run = Run().begun()
    run.feed(Lost(Member(2, 0)))
    begin = begin_of(run.answer({0: 4, 1: 5}, held={0: ((0, 2),)}))
    assert (5, ((0, 4),), (1,)) == (begin.applied, begin.behind, begin.holders)
    assert ((), ()) == begin.kept, "nodes of a step that is over count for nothing"


def test_who_is_lost_while_answers_are_awaited_is_not_waited_for_and_the_answers_of_others_count():
    run = Run().begun()
    run.feed(Lost(Member(2, 0)))
    assert not run.feed(Answered(Member(0, 0), 2, 0))
    begin = begin_of(run.feed(Lost(Member(1, 0))))
    assert (2, (0,)) == (begin.epoch, begin.numbers)
    assert run.feed(Answered(Member(1, 0), 2, 0)) == [Order((Member(1, 0),), Dismiss("others have gone on without it"))]


def test_who_comes_while_answers_are_awaited_is_asked_and_nobody_else_again():
    run = Run().begun()
    run.feed(Lost(Member(2, 0)))
    run.feed(Answered(Member(0, 0), 2, 5, validated=5))
    assert [Order((Member(7, 0),), Prepare(2))] == run.register(7, applied=3)
    run.feed(Answered(Member(7, 0), 2, 3))
    begin = begin_of(run.feed(Answered(Member(1, 0), 2, 5, validated=5)))
    assert (2, (0, 1, 7), ((7, 3),)) == (begin.epoch, begin.numbers, begin.behind)


def test_who_comes_while_answers_are_awaited_waits_where_no_place_is_free():
    run = Run(maximum=2, count=2).begun(2)
    run.feed(LeaveAsked(1))
    assert [Order((Member(7, 0),), Prepare(2))] == run.register(7)
    assert not run.register(8)
    assert (0, 7) == begin_of(run.answer()).numbers


def test_who_is_asked_to_leave_while_answers_are_awaited_goes_when_the_epoch_begins():
    run = Run().begun()
    run.feed(Lost(Member(2, 0)))
    run.feed(Answered(Member(1, 0), 2, 0, validated=0))
    assert not run.feed(LeaveAsked(1))
    orders = run.feed(Answered(Member(0, 0), 2, 0, validated=0))
    assert (2, (0,)) == (begin_of(orders).epoch, begin_of(orders).numbers)
    assert Order((Member(1, 0),), Dismiss("it was asked to leave")) in orders


def test_a_worker_that_can_follow_gets_the_weights_while_the_others_go_on():
    run = Run().begun()
    [order] = run.follow(3)
    assert Order((Member(3, 0),), Follow(1, run.state.begin.seats)) == order
    assert order == order_from_json(order_to_json(Member(3, 0), order.message).encode())
    assert order in run.feed(Tick()), "orders may be lost"
    assert (Phase.RUNNING, 1) == (run.state.phase, run.state.epoch)
    assert [0, 1, 2, 3] == told(run.follow(3, applied=7))
    begin = begin_of(run.answer({0: 8, 1: 8, 2: 8, 3: 7}))
    assert ((0, 1, 2, 3), ((3, 7),)) == (begin.numbers, begin.behind)


def test_a_worker_that_follows_hears_of_each_epoch_that_begins_without_it():
    run = Run().begun()
    run.follow(3)
    run.feed(Lost(Member(2, 0)))
    orders = run.answer()
    assert Order((Member(3, 0),), Follow(2, run.state.begin.seats)) in orders


def test_a_worker_follows_only_where_there_is_room_for_it():
    run = Run(minimum=1, maximum=4).begun()
    assert run.follow(3)
    run.follow(3, applied=1)
    run.answer(1)
    assert not run.follow(4)
    run.feed(Lost(Member(0, 0)))
    assert [4] == told(run.answer(1), Follow)


def test_a_worker_that_could_follow_takes_part_at_once_where_too_few_are_left():
    run = Run(count=2, minimum=2).begun(2)
    run.feed(Lost(Member(1, 0)))
    assert Phase.COLLECTING is run.state.phase
    assert told(run.follow(2), Prepare)
    assert ((2, None),) == begin_of(run.answer({0: 5, 2: None})).behind


def test_a_worker_that_cannot_get_the_weights_by_itself_takes_part_without_them():
    run = Run().begun()
    run.follow(3)
    assert {Prepare(2)} == {order.message for order in run.register(3, applied=None)}


def test_the_run_goes_on_from_what_a_worker_has_that_followed_if_all_members_end():
    run = Run(count=1).begun(1)
    run.follow(1)
    assert told(run.feed(Lost(Member(0, 0))), Prepare)
    assert ((1,), 7) == (begin_of(run.answer(7)).numbers, run.state.begin.applied)


def test_a_worker_that_comes_takes_part_without_having_the_weights():
    run = Run().begun()
    run.register(3, applied=None)
    begin = begin_of(run.answer({0: 7, 1: 7, 2: 7, 3: None}))
    assert ((0, 1, 2, 3), ((3, None),), (0, 1, 2)) == (begin.numbers, begin.behind, begin.holders)


def test_a_worker_beyond_the_maximum_waits_and_takes_the_place_of_one_that_is_lost():
    run = Run(maximum=3).begun()
    assert not run.register(3, applied=None)
    run.feed(Lost(Member(1, 0)))
    assert (0, 2, 3) == begin_of(run.answer({0: 2, 2: 2, 3: None})).numbers


def test_the_same_worker_again_has_the_same_number_and_its_earlier_process_is_turned_away():
    run = Run().begun()
    run.register(1, incarnation=1, applied=None)
    begin = begin_of(run.answer({0: 3, 1: None, 2: 3}))
    assert Member(1, 1) == begin.seats[1].member
    [order] = run.feed(Progressed(Member(1, 0), run.state.epoch, 9))
    assert ((Member(1, 0),), Dismiss) == (order.to, type(order.message))
    [order] = run.register(1, incarnation=0)
    assert ((Member(1, 0),), Dismiss) == (order.to, type(order.message))
    assert Member(1, 1) == run.state.workers[1].seat.member


def test_a_worker_that_leaves_is_dismissed_when_the_others_have_answered():
    run = Run().begun()
    run.feed(LeaveAsked(0))
    orders = run.answer(3)
    assert [0] == told(orders, Dismiss)
    assert (1, 2) == begin_of(orders).numbers


def test_the_only_holder_of_the_weights_stays_until_another_one_has_them():
    run = Run(1).begun(1)
    run.register(1, applied=None)
    run.answer({0: 3, 1: None})
    assert not run.feed(LeaveAsked(0))
    run.feed(Progressed(Member(1, 0), run.state.epoch, 3))
    assert (1,) == begin_of(run.answer(3)).numbers


def test_too_few_workers_wait_and_go_on_when_one_comes():
    run = Run(2, minimum=2).begun(2)
    run.feed(Lost(Member(1, 0)))
    assert not run.answer(5)
    assert 1 == run.state.missing
    run.register(1, incarnation=1, applied=None)
    assert (0, 1) == begin_of(run.answer({0: 5, 1: None})).numbers


@pytest.mark.parametrize("is_ordered_first", [False, True])
def test_those_who_are_left_of_a_run_that_was_ordered_to_stop_end_it_together_however_few_they_are(is_ordered_first):
    run = Run(3, minimum=3).begun()
    for event in [EndOrdered(), Lost(Member(2, 0))][:: 1 if is_ordered_first else -1]:
        run.feed(event)
    begin = begin_of(run.answer({0: 5, 1: 4}))
    assert ((0, 1), (0,), ((1, 4),)) == (begin.numbers, begin.holders, begin.behind)


def test_members_that_have_answered_go_on_as_soon_as_the_run_is_ordered_to_stop():
    run = Run(2, minimum=2).begun(2)
    run.feed(Lost(Member(1, 0)))
    assert not run.answer(5)
    assert (0,) == begin_of(run.feed(EndOrdered())).numbers


def test_a_server_without_workers_waits_for_them_to_the_end():
    """It hands out tasks, and computes nothing itself."""
    run = Run(2, minimum=2)
    run.state = replace(run.state, terms=replace(run.state.terms, servers=1))
    run.begun(2).feed(EndOrdered())
    run.feed(Lost(Member(1, 0)))
    assert not run.answer(5)


def test_a_late_report_does_not_bring_back_a_process_that_was_lost():
    run = Run().begun()
    run.feed(Lost(Member(2, 0)))
    [order] = run.register(2)
    assert ((Member(2, 0),), Dismiss) == (order.to, type(order.message))
    assert 2 not in run.state.workers


def test_reports_that_overtake_one_another_take_nothing_back():
    run = Run(2).begun(2)
    run.feed(Progressed(Member(0, 0), 1, 9, is_done=True))
    run.feed(Progressed(Member(0, 0), 1, 8))
    assert 9 == run.state.workers[0].applied
    assert [0, 1] == told(run.feed(Progressed(Member(1, 0), 1, 9, is_done=True)), Finish)


def test_who_leaves_gives_its_weights_first_and_an_epoch_has_no_more_members_than_leaves():
    run = Run(2, minimum=1, maximum=2, micro_batches=2).begun(2)
    run.feed(LeaveAsked(0)), run.feed(LeaveAsked(1))
    run.register(2, applied=None), run.register(3, applied=None)
    begin = begin_of(run.answer({0: 5, 1: 5, 2: None, 3: None}))
    assert ((0, 2), (0,)) == (begin.numbers, begin.holders)


def test_who_leaves_stays_until_somebody_has_caught_up_with_it():
    run = Run(2).begun(2)
    run.feed(LeaveAsked(0))
    begin = begin_of(run.answer({0: 5, 1: 4}))
    assert ((0, 1), ((1, 4),)) == (begin.numbers, begin.behind)
    assert not run.feed(Progressed(Member(1, 0), begin.epoch, 4)), "the epoch that gives it the step goes on"
    run.feed(Progressed(Member(1, 0), begin.epoch, 5))
    assert (1,) == begin_of(run.answer(5)).numbers


def test_a_stranded_run_goes_on_when_one_that_was_counted_as_lost_comes_again():
    run = Run(1).begun(1)
    run.feed(Lost(Member(0, 0)))
    [order] = run.feed(Progressed(Member(0, 0), 1, 3))
    assert Dismiss is type(order.message)
    run.register(0, incarnation=1, applied=3)
    assert (3, (0,)) == ((begin := begin_of(run.answer(3))).applied, begin.numbers)


def test_after_the_end_those_that_others_have_gone_on_without_are_told():
    run = Run(2).begun(2)
    run.feed(Lost(Member(0, 0)))
    run.answer(9, is_done=True)
    run.feed(Progressed(Member(1, 0), run.state.epoch, 9, is_done=True))
    assert Phase.FINISHED is run.state.phase
    [order] = run.feed(Progressed(Member(0, 0), 1, 8))
    assert ((Member(0, 0),), Dismiss) == (order.to, type(order.message))


def test_a_run_whose_last_holder_of_the_weights_is_lost_is_stranded():
    run = Run(2).begun(2)
    run.register(2, applied=None)
    run.feed(Lost(Member(0, 0))), run.feed(Lost(Member(1, 0)))
    run.answer(None)
    assert Phase.STRANDED is run.state.phase


def test_a_worker_that_has_got_the_weights_goes_on_alone_although_it_has_not_said_so():
    run = Run(1).begun(1)
    run.register(1, applied=None)
    run.answer({0: 3, 1: None})
    run.feed(Lost(Member(0, 0)))
    assert (1,) == begin_of(run.answer(3)).numbers


def test_the_run_ends_when_every_member_has_made_the_last_step():
    run = Run(2).begun(2)
    assert not run.feed(Progressed(Member(0, 0), 1, 9, is_done=True))
    assert [0, 1] == told(run.feed(Progressed(Member(1, 0), 1, 9, is_done=True)), Finish)


def test_in_a_new_epoch_who_was_done_says_it_again():
    """The member that is gone may have had to write the last checkpoint: another one does it, and the others wait."""
    run = Run(3).begun()
    run.feed(Progressed(Member(1, 0), 1, 9, is_done=True)), run.feed(Progressed(Member(2, 0), 1, 9, is_done=True))
    run.feed(Lost(Member(0, 0)))
    begin = begin_of(run.answer(9, is_done=True))
    assert not run.feed(Progressed(Member(2, 0), begin.epoch, 9, is_done=True))
    assert [1, 2] == told(run.feed(Progressed(Member(1, 0), begin.epoch, 9, is_done=True)), Finish)


def test_after_the_last_step_a_member_that_lacks_it_only_catches_up():
    run = Run(3).begun()
    run.feed(Lost(Member(2, 0)))
    epoch = run.state.epoch
    run.feed(Answered(Member(0, 0), epoch, 9, (), 9, is_done=True))
    begin = begin_of(run.feed(Answered(Member(1, 0), epoch, 8, ((0, 1),), 8)))
    assert (((1, 8),), ((), ()), ((), ())) == (begin.behind, begin.kept, begin.todo)


def test_orders_are_repeated_only_to_those_that_have_not_obeyed():
    run = Run().begun()
    run.feed(Progressed(Member(1, 0), 1, 0))
    assert [0, 2] == told(run.feed(Tick()))
    run.feed(Lost(Member(2, 0)))
    run.feed(Answered(Member(0, 0), run.state.epoch, 0))
    assert [Order((Member(1, 0),), Prepare(run.state.epoch))] == run.feed(Tick())


def steps_until_divided(paces_at, *, most=60, looks_each_step=3):
    """Make steps, with looks between them, until the work is divided anew; returns after which, and the run."""
    run = Run(2, micro_batches=10).begun(2)
    for applied in range(1, most + 1):
        for number, pace in enumerate(paces_at(applied)):
            run.feed(Progressed(Member(number, 0), 1, applied, pace))
        for _ in range(looks_each_step):
            run.feed(Tick())
        if run.state.phase is Phase.COLLECTING:
            return applied, run
    return None, run


def test_blocks_are_cut_anew_once_a_member_is_known_to_be_slow():
    applied, run = steps_until_divided(lambda _: (0.1, 0.4))
    assert 16 <= applied <= 20
    assert ((0, 8), (8, 10)) == begin_of(run.answer(applied)).blocks


def test_a_member_that_is_slow_for_a_moment_keeps_its_block():
    def paces_at(applied):
        return (0.1, 0.4) if applied % 8 < 2 else (0.1, 0.1)

    assert steps_until_divided(paces_at)[0] is None


def test_many_looks_within_one_step_are_one():
    assert steps_until_divided(lambda applied: (0.1, 0.4 if applied == 20 else 0.1), looks_each_step=50)[0] is None


def test_orders_survive_the_way_as_json():
    run = Run().begun()
    lines = list(orders_to_json(run.orders))
    each = [Order((member,), order.message) for order in run.orders for member in order.to]
    assert each == [order_from_json(line.encode()) for _, line in lines]
    assert [order.to for order in each] == [(member,) for member, _ in lines]


def test_orders_that_are_written_together_are_those_written_one_by_one():
    run = Run().begun()
    orders = [*run.orders, *run.feed(Lost(Member(2, 0))), Order((Member(7, 1), Member(8, 0)), Finish())]
    lines = [line for _, line in orders_to_json(orders)]
    assert [order_to_json(member, order.message) for order in orders for member in order.to] == lines
    assert '{"kind": "finish", "to": {"number": 7, "incarnation": 1}}' == lines[-2]
    assert '{"kind": "prepare", "to": {"number": 0, "incarnation": 0}, "epoch": 2}' in lines


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b'{"kind": "begin"}', b'{"kind": "stop", "to": {"number": 0, "incarnation": 0}}', b"\xff"],
)
def test_what_is_no_order_is_refused_with_a_reason(data):
    assert isinstance(order_from_json(data), BadRecord)


def test_an_order_whose_lists_differ_in_length_is_refused():
    run = Run().begun()
    text = order_to_json(Member(0, 0), run.state.begin).replace('"todo": [', '"todo": [[], ').encode()
    assert isinstance(order_from_json(text), BadRecord)
