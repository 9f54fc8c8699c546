"""Steps of which the fastest member may lead the slowest, on a virtual clock with made-up costs: what is applied when, and what a change costs."""

from functools import partial

import pytest

from tests.lab.test_virtual_members import LEAF_S, MICRO_BATCHES, REST_S, epochs, outcomes, run
from ttlaunch.lab.virtual_leads import StepsAhead
from ttlaunch.lab.virtual_steps import StepsTogether

STEP_S = 4 * LEAF_S + REST_S
ALONE_S = MICRO_BATCHES * LEAF_S + REST_S
RING_S = 0.01  # two pieces of half of it, one after the other


def lead(text, *, clock_gap=2, **options):
    """Let two workers make 30 steps, of which the faster one may lead the other by two; returns the members and the verdict."""
    work = partial(StepsAhead, clock_gap=clock_gap) if clock_gap else StepsTogether
    return run(text, recipe="classic_dp", work=work, **{"mean_s": RING_S, **options})


def test_messages_travel_while_the_next_step_is_computed():
    members, verdict = lead("")
    assert [(0, (0, 1))] == epochs(members)
    assert 30 * STEP_S + RING_S == pytest.approx(members.over_s)
    # The mean of the first step is there when the second one is computed, and applied at its end.
    assert 2 * STEP_S == pytest.approx(members.epochs[0].done_s)
    assert ("done", 30) == (verdict.status, members.steps_done)


@pytest.mark.parametrize(("clock_gap", "delays"), [(0, 2), (1, 1), (2, 1)])
def test_short_delays_of_different_members_do_not_add_up(clock_gap, delays):
    text = "stop rank=0 at 1s; continue rank=0 at 1.3s; stop rank=1 at 2.2s; continue rank=1 at 2.5s"
    undisturbed, _ = lead("", clock_gap=clock_gap)
    members, _ = lead(text, clock_gap=clock_gap)
    assert delays * 0.3 == pytest.approx(members.over_s - undisturbed.over_s, abs=REST_S)


@pytest.mark.parametrize("clock_gap", [1, 2, 5])
def test_a_member_leads_a_stopped_one_by_as_many_steps_as_it_may(clock_gap):
    members, _ = lead("stop rank=1 at step=5; kill rank=0 at 6s", clock_gap=clock_gap)
    # Worker 1 has given five steps, and worker 0 these and as many more as it may.
    assert (5, 5 + clock_gap) == (members.steps_done, members.processes[0].reported)


def test_a_slow_member_sets_the_pace():
    members, _ = lead("", slow={1: 3.0})
    assert 30 * 3 * 4 * LEAF_S + RING_S == pytest.approx(members.over_s)


def test_messages_that_take_longer_than_a_step_set_the_pace():
    members, _ = lead("", mean_s=1.0, pace_s=1.0)
    # The first step has no message before it, and the last one is followed by its own.
    assert 4 * LEAF_S + 30 * 1.0 == pytest.approx(members.over_s)


def test_who_is_left_computes_all_steps_again_that_it_has_begun_and_not_applied():
    members, verdict = lead("kill rank=1 at step=5", start_s=9.0)
    alone = members.epochs[1]
    # Step 4 was applied when step 5 was computed, and worker 0 was in step 6.
    assert [(0, (0, 1)), (4, (0,))] == epochs(members)[:2]
    assert 5 * STEP_S + 0.3 == pytest.approx(alone.at_s)
    assert MICRO_BATCHES == alone.computed_anew
    # Alone it computes steps 5 and 6, and then applies both.
    assert alone.at_s + 2 * ALONE_S == pytest.approx(alone.done_s)
    assert 30 == sum(one.steps for one in members.epochs)
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_who_comes_gets_the_state_when_it_takes_part():
    members, verdict = lead("join at step=3")
    assert [(0, 1), (0, 1, 2)] == [one.members for one in members.epochs]
    came = members.processes[2]
    assert came.started_s + 1.0 == came.ready_s
    assert ([1, 0], 300) == (came.taken, came.got)
    assert ["endured"] == outcomes(verdict)


def test_a_member_that_lacks_a_step_which_another_one_has_applied_gets_the_state():
    """Worker 0 has waited for the mean of a step, and applied it at once; worker 1, which is slow, would have after its next step."""
    members, _ = lead("kill rank=2 at 9.1s", ranks=3, slow={1: 3.0}, start_s=60.0)
    assert [(0, 1, 2), (0, 1)] == [one.members for one in members.epochs]
    assert [[0, 0], [1, 0]] == [members.processes[number].taken for number in (0, 1)]
    assert 30 == sum(one.steps for one in members.epochs)


def test_a_worker_that_is_continued_in_time_stays():
    members, verdict = lead("stop rank=1 at step=5; continue rank=1 at 4s")
    assert [(0, (0, 1))] == epochs(members)
    assert 30 * STEP_S + RING_S + 4.0 - 5 * STEP_S == pytest.approx(members.over_s)
    assert ["endured", "endured"] == outcomes(verdict)


def test_a_worker_that_is_lost_after_the_last_step_has_made_it():
    members, verdict = lead("kill rank=1 at step=30")
    assert [(0, (0, 1)), (30, (0,))] == epochs(members)
    assert [30, 0] == [one.steps for one in members.epochs]
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_every_step_counts_once_whoever_comes_and_goes():
    text = "join at 0.61s; kill rank=0 at 2.03s; leave rank=2 at 4.4s; segv rank=1 at 5.15s; join at step=12"
    members, verdict = lead(text, ranks=3, elastic="1:4", steps=40, state_s=0.05)
    assert ("done", 40, 40) == (verdict.status, members.steps_done, sum(one.steps for one in members.epochs))
    assert 6 <= len(members.epochs)
    assert ["endured", "replaced", "endured", "replaced", "endured"] == outcomes(verdict)


def test_all_workers_lost_end_the_run():
    _, verdict = lead("kill role=worker at step=5")
    assert ("failed", "R004", ["named"]) == (verdict.status, verdict.failure.code, outcomes(verdict))
