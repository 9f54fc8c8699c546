"""Tasks that a server hands out on a virtual clock, with made-up costs: who gets which, what a change costs, and the verdict."""

from functools import partial

import pytest

from tests.lab.test_virtual_members import LEAF_S, MICRO_BATCHES, epochs, outcomes, run
from ttlaunch.lab.virtual_tasks import TasksHandedOut

TASK_S = MICRO_BATCHES * LEAF_S
WEIGHTS_S = 0.02  # both workers get them at a time, and nothing else takes time before the first micro-batch


def hand_out(text, *, most_in_hand=2, ranks=3, elastic="2:4", **options):
    """Let a server hand 30 tasks to two workers, which have two at a time; returns the members and the verdict."""
    work = partial(TasksHandedOut, most_in_hand=most_in_hand)
    return run(text, ranks=ranks, elastic=elastic, recipe="elastic_dp", work=work, **{"mean_s": WEIGHTS_S, **options})


@pytest.fixture(params=[1, 2], ids=["in turns", "ahead"])
def in_hand(request):
    """How many tasks a worker has at a time."""
    return request.param


def test_each_task_is_done_by_one_worker_and_none_waits_for_the_other(in_hand):
    members, verdict = hand_out("", most_in_hand=in_hand)
    assert [(0, (0, 1, 2))] == epochs(members)
    assert (30, [0]) == (members.steps_done, [one.tasks_again for one in members.epochs])
    assert WEIGHTS_S + 15 * TASK_S == pytest.approx(members.over_s, abs=2 * WEIGHTS_S)
    assert ("done", 0) == (verdict.status, verdict.exit_status)


@pytest.mark.parametrize(("most_in_hand", "waited_s"), [(1, 0.3), (2, 0.3)])
def test_a_worker_waits_for_answers_as_long_as_one_that_stays(most_in_hand, waited_s):
    members, _ = hand_out("", most_in_hand=most_in_hand, waited_s=waited_s)
    # The first task has begun with weights that were there, and the last one is followed by its answer alone.
    tasks_s = 15 * TASK_S + (15 if most_in_hand == 1 else 14) * waited_s
    assert WEIGHTS_S + tasks_s == pytest.approx(members.over_s, abs=waited_s + LEAF_S)


def test_a_slow_worker_does_fewer_tasks():
    members, _ = hand_out("", slow={2: 3.0})
    fast, slow = 30 * 3 / 4, 30 / 4
    assert WEIGHTS_S + fast * TASK_S == pytest.approx(members.over_s, abs=3 * TASK_S)
    assert slow * 3 * TASK_S == pytest.approx(members.over_s, abs=3 * TASK_S)


def test_tasks_of_a_killed_worker_are_handed_out_again_and_nobody_waits_for_another_one(in_hand):
    members, verdict = hand_out("kill rank=1 at step=9", most_in_hand=in_hand)
    # Both have pushed their fifth gradient when it is killed. 0.25 s later the other one stops after its third micro-batch.
    died_s = WEIGHTS_S + 5 * TASK_S
    assert [(0, (0, 1, 2)), (10, (0, 2)), (11, (0, 2, 4))] == epochs(members)
    _, alone, with_it = members.epochs
    assert (in_hand, 0) == (alone.tasks_again, alone.computed_anew)
    assert died_s + 3 * LEAF_S == pytest.approx(alone.at_s)
    assert died_s + TASK_S == pytest.approx(alone.done_s, abs=LEAF_S)  # its task goes on where it was
    assert None is alone.lost_s
    assert died_s + 0.25 + 1.0 == pytest.approx(with_it.at_s, abs=LEAF_S)
    assert (30, 30) == (members.steps_done, sum(one.steps for one in members.epochs))
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_who_comes_takes_part_at_once_and_gets_weights_from_the_server():
    members, verdict = hand_out("join at step=12")
    assert [(0, 1, 2), (0, 1, 2, 3)] == [one.members for one in members.epochs]
    came = members.processes[3]
    assert came.started_s + 1.0 == came.ready_s
    assert came.ready_s == pytest.approx(members.epochs[1].at_s, abs=LEAF_S)
    assert ([1, 0], round(WEIGHTS_S * 1e3)) == (came.taken, came.got)
    assert 0 < came.reported
    assert ["endured"] == outcomes(verdict)


def test_others_go_on_without_a_stopped_worker_until_it_is_killed(in_hand):
    members, verdict = hand_out("stop rank=1 at step=6", most_in_hand=in_hand)
    alone = members.epochs[1]
    # Its tasks are 1, 2, 5, 7 or 1, 3, 5, 7; then the other one alone brings a gradient in each 0.8 s.
    stopped_s = WEIGHTS_S + 4 * TASK_S
    assert ("worker-0001 made no progress for 5 s and was killed",) == alone.reasons
    assert 4 + int((stopped_s + 5.0) / TASK_S) == alone.step
    assert (in_hand, 30) == (alone.tasks_again, members.steps_done)
    assert ["replaced"] == outcomes(verdict)


def test_a_worker_that_is_continued_delays_nobody_else(in_hand):
    members, verdict = hand_out("stop rank=1 at step=6; continue rank=1 at 4s", most_in_hand=in_hand)
    stopped_s = 4.0 - (WEIGHTS_S + 4 * TASK_S)
    assert [(0, (0, 1, 2))] == epochs(members)
    # What it has not done meanwhile, both do.
    assert WEIGHTS_S + 15 * TASK_S + stopped_s / 2 == pytest.approx(members.over_s, abs=TASK_S)
    assert ["endured", "endured"] == outcomes(verdict)


@pytest.mark.parametrize(("most_in_hand", "ahead"), [(1, 0), (2, 1)])
def test_workers_of_a_stopped_server_wait_for_its_answer(most_in_hand, ahead):
    """They go on with their fourth task and, with another one in hand, with its first micro-batch."""
    undisturbed, _ = hand_out("", most_in_hand=most_in_hand)
    members, verdict = hand_out("stop rank=0 at step=6; continue rank=0 at 4s", most_in_hand=most_in_hand)
    waited_s = 4.0 - (WEIGHTS_S + 4 * TASK_S) - ahead * LEAF_S
    assert waited_s == pytest.approx(members.over_s - undisturbed.over_s, abs=2 * WEIGHTS_S)
    assert [(0, (0, 1, 2))] == epochs(members)
    assert ["endured", "endured"] == outcomes(verdict)


def test_a_run_whose_server_ends_is_over_and_names_it():
    members, verdict = hand_out("kill rank=0 at step=5")
    assert [(0, (0, 1, 2))] == epochs(members)
    assert ("failed", 1, "R004", 0) == (verdict.status, verdict.exit_status, verdict.failure.code, verdict.failure.rank)
    assert ["named"] == outcomes(verdict)


def test_a_run_whose_server_makes_no_progress_is_over_when_it_is_killed():
    """The launcher itself has killed it, and says why, and that nobody else has the weights."""
    members, verdict = hand_out("stop rank=0 at step=6")
    assert WEIGHTS_S + 3 * TASK_S + 5.0 == pytest.approx(members.over_s, abs=2 * WEIGHTS_S)
    failure = verdict.failure
    assert ("hung", 6, "R075", 0) == (verdict.status, verdict.exit_status, failure.code, failure.rank)
    expected = "rank 0 (member, localhost) took the weights with it: it was killed because it made no progress for 5 s in step 7"
    assert expected == failure.message
    left = "the 2 workers that are left cannot go on: the weights are gone with those that ended"
    assert (left, "worker-0000 made no progress for 5 s and was killed") == failure.evidence
    assert ["named"] == outcomes(verdict)


def test_a_worker_that_makes_no_progress_is_not_named_where_the_server_ends_soon_after():
    """Nobody has gone on without the worker yet, but only the server had the weights."""
    stopped_s = WEIGHTS_S + 4 * TASK_S
    members, verdict = hand_out(f"stop rank=1 at step=6; kill rank=0 at {stopped_s + 5.05:.2f}s")
    assert [(0, 1, 2)] == [one.members for one in members.epochs if one.steps]
    assert "made no progress for 5 s" == members.processes[1].hung
    assert ("failed", "R004", 0) == (verdict.status, verdict.failure.code, verdict.failure.rank)
    assert ["replaced", "named"] == outcomes(verdict)


def test_a_worker_may_leave_and_the_server_not():
    members, verdict = hand_out("leave rank=0 at step=4; leave rank=2 at step=5")
    assert ["", "left"] == [members.processes[number].why for number in (0, 2)]
    assert (2, (0, 1)) == (members.epochs[1].tasks_again, members.epochs[1].members)
    assert ["not made", "endured"] == outcomes(verdict)
    assert "worker-0000 cannot leave: it is the server, which alone has the weights" == verdict.faults[0].reason


def test_the_server_waits_alone_until_somebody_comes():
    members, verdict = hand_out("kill rank=1 at step=6", ranks=2, elastic="2:3", steps=12)
    assert [(0, (0, 1)), (6, (0, 3))] == epochs(members)
    assert WEIGHTS_S + 6 * TASK_S + 0.25 + 1.0 == pytest.approx(members.epochs[1].at_s)
    assert ("done", 12, ["replaced"]) == (verdict.status, members.steps_done, outcomes(verdict))


def test_a_worker_that_has_waited_for_the_end_does_the_last_task_of_one_that_is_killed(in_hand):
    members, verdict = hand_out("kill rank=1 at 11.9s", most_in_hand=in_hand)
    assert [(0, (0, 1, 2)), (29, (0, 2))] == epochs(members)
    change = members.epochs[1]
    assert (1, 1) == (change.tasks_again, change.steps)
    assert 11.9 + 0.25 + TASK_S == pytest.approx(members.over_s, abs=LEAF_S)
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_the_others_hear_of_the_end_again_when_one_is_lost_after_the_last_step():
    """Answers take 0.2 s: when worker 1 is killed the last update is made, and nobody has heard of it."""
    members, verdict = hand_out("kill rank=1 at 3.5s", steps=6, most_in_hand=1, waited_s=0.4)
    assert [(0, (0, 1, 2)), (6, (0, 2))] == epochs(members)
    assert [6, 0] == [one.steps for one in members.epochs]
    assert 0 == members.epochs[1].tasks_again
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_every_task_counts_once_whoever_comes_and_goes(in_hand):
    text = (
        "join at 0.61s; kill rank=1 at 2.03s; leave rank=2 at 4.4s; segv rank=3 at 5.15s; join at step=12;"
        "stop rank=4 at 6s; continue rank=4 at 7s"
    )
    members, verdict = hand_out(text, most_in_hand=in_hand, elastic="2:5", steps=60)
    assert ("done", 60, 60) == (verdict.status, members.steps_done, sum(one.steps for one in members.epochs))
    assert 6 <= len(members.epochs)
    assert ["endured", "replaced", "endured", "replaced", "endured", "endured", "endured"] == outcomes(verdict)


@pytest.fixture
def three_hosts(tmp_path):
    """`three_hosts(text, …)`: a server on host a, and a worker each on b and c."""
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("a slots=1\nb slots=1\nc slots=1\n")
    return lambda text, **options: hand_out(text, **{"hostfile": hostfile, "lease_s": 4.3, "elastic": "2:3", **options})


def test_a_worker_of_a_silent_host_brings_gradients_until_its_lease_is_over(three_hosts):
    members, verdict = three_hosts("cut host=b at step=6")
    cut_s = WEIGHTS_S + 3 * TASK_S
    assert [(0, (0, 1, 2)), (2 * int((cut_s + 4.3) / TASK_S), (0, 2))] == epochs(members)
    assert ("worker-0001 was on a host that was lost",) == members.epochs[1].reasons
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_a_silent_host_with_the_server_ends_the_run_and_is_named(three_hosts):
    members, verdict = three_hosts("cut host=a at step=6")
    assert [(0, (0, 1, 2))] == epochs(members)
    assert ("failed", 7, "R012", "a") == (
        verdict.status,
        verdict.exit_status,
        verdict.failure.code,
        verdict.failure.host,
    )
    assert ["named"] == outcomes(verdict)


def test_a_run_that_needs_a_worker_of_a_silent_host_waits_without_end(three_hosts):
    members, verdict = three_hosts("cut host=b at step=6", elastic="3:3")
    assert (True, "waiting", ["awaited"]) == (members.waits, verdict.status, outcomes(verdict))
