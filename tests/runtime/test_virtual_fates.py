"""Ranks on a virtual clock that end, are stopped and continued by order: when, what of their messages arrives, and who waits then."""

import pytest
import torch

from ttlaunch.runtime.comm.virtual_clock import Link, VirtualClock
from ttlaunch.runtime.comm.virtual_fates import Deed, FateOrder, Fates, RankEndedError
from ttlaunch.runtime.comm.virtual_world import VirtualWorld

LATENCY_S, BYTES_PER_S = 0.25, 16.0  # so that a message of four float32 passes in 1 s
STEP_S = 1.0


def play(orders, *functions):
    """Run a function for each rank; return the clock, the fates, and how each rank ended."""
    ranks = list(range(len(functions)))
    clock, ends = VirtualClock(ranks), {}
    fates = Fates([FateOrder(index, *order) for index, order in enumerate(orders)], ranks, clock)
    world = VirtualWorld(["peer"] * len(ranks), clock, Link(LATENCY_S, BYTES_PER_S), fates=fates)

    def live(rank):
        def compute(seconds):
            world.compute(rank, seconds)

        try:
            functions[rank](world.communicator(rank), compute, lambda step: fates.report(rank, step))
            ends[rank] = "done"
        except RankEndedError:
            ends[rank] = "ended"

    outcome = world.run({rank: lambda rank=rank: live(rank) for rank in ranks})
    assert ({}, []) == (outcome.errors, outcome.findings)
    return clock, fates, ends


def steps(count):
    def function(_comm, compute, report):
        for step in range(1, count + 1):
            compute(STEP_S)
            report(step)

    return function


def sends(comm, compute, report):
    for step in (1, 2):
        compute(STEP_S)
        comm.send(torch.zeros(4), dest=1)
        report(step)


def receives(comm, _compute, report):
    for step in (1, 2):
        comm.recv(torch.zeros(4), source=0)
        report(step)


def both(rank, *more):
    return frozenset({rank, *more})


def test_a_rank_ends_when_it_has_reported_the_step_and_does_nothing_more():
    clock, fates, ends = play([(Deed.END, both(0), 2)], steps(5))
    assert {0: "ended"} == ends
    assert (2, 3.0) == (fates.last_step(0), clock.now_s(0))  # it notices at its next operation
    assert [(0, 2.0, 2, (0,))] == [(one.index, one.at_s, one.step, one.ranks) for one in fates.made]


def test_a_rank_that_waits_ends_at_the_time_and_who_waits_for_it_waits_for_ever():
    clock, fates, ends = play([(Deed.END, both(0), 0, 1.5)], sends, receives)
    assert {0: "ended"} == ends
    assert 1.5 == clock.now_s(0)
    assert fates.is_broken
    assert 0 == fates.last_step(1)  # half of the message had left


def test_a_message_whose_last_byte_has_left_arrives_although_its_sender_has_ended():
    _, fates, ends = play([(Deed.END, both(0), 0, 2.1)], sends, receives)
    assert ({0: "ended"}, 1) == (ends, fates.last_step(1))


def test_what_is_ordered_when_any_of_several_ranks_reports_a_step_hits_all_of_them():
    def slow(_comm, compute, report):
        compute(10 * STEP_S)
        report(1)

    clock, fates, ends = play([(Deed.END, both(0, 1), 3)], steps(5), slow)
    assert {0: "ended", 1: "ended"} == ends
    assert 3.0 == fates.made[0].at_s
    assert 10.0 == clock.now_s(1)  # one operation is never cut


def test_a_stopped_rank_goes_on_with_the_rest_of_its_work():
    clock, fates, ends = play([(Deed.STOP, both(0), 0, 1.5), (Deed.CONTINUE, both(0), 0, 4.0)], sends, receives)
    assert {0: "done", 1: "done"} == ends
    assert not fates.is_broken
    assert 6.0 == clock.now_s(0)  # its first message leaves at 2, it goes on at 4, computes, and sends


def test_a_rank_that_is_stopped_while_it_computes_has_the_rest_left():
    clock, _, _ = play([(Deed.STOP, both(0), 0, 0.25), (Deed.CONTINUE, both(0), 0, 5.0)], steps(1), steps(9))
    assert 5.75 == clock.now_s(0)
    assert (1.0, 4.75) == (clock.spent(0).computing_s, clock.spent(0).waiting_s)


@pytest.mark.parametrize(("deed", "end"), [(Deed.END, "ended"), (Deed.ASK, None)])
def test_only_a_hard_end_reaches_a_rank_that_is_stopped(deed, end):
    _, fates, ends = play([(Deed.STOP, both(0), 0, 0.5), (deed, both(0), 0, 0.75)], steps(2))
    assert end == ends.get(0)
    assert fates.is_broken


def test_a_rank_that_was_asked_to_end_ends_when_it_is_continued():
    orders = [(Deed.STOP, both(0), 0, 0.5), (Deed.ASK, both(0), 0, 0.75), (Deed.CONTINUE, both(0), 0, 3.0)]
    clock, _, ends = play(orders, steps(2), steps(9))
    assert ("ended", 3.0) == (ends[0], clock.now_s(0))


def test_an_order_for_a_rank_that_has_ended_is_not_made():
    _, fates, _ = play([(Deed.END, both(0), 0, 5.0)], steps(1), steps(9))
    assert [] == fates.made


def test_a_moment_is_noted_when_the_furthest_rank_reports_it():
    _, fates, ends = play([(Deed.NOTE, frozenset(), 2)], steps(1), steps(3))
    assert {0: "done", 1: "done"} == ends
    assert [(2.0, 2, ())] == [(one.at_s, one.step, one.ranks) for one in fates.made]
