"""When a run is started again: only if it may end otherwise, and only while it gets further."""

import pytest

from ttlaunch.running.restarts import Attempt, GiveUp, Restart, plan_restart


def attempt(folder, *, steps, status=1, comes_again=False, checkpoint=None, lost=None):
    folder.mkdir(parents=True)
    if checkpoint is not None:
        (folder / f"checkpoints/step-{checkpoint}").mkdir(parents=True)
    return Attempt(folder, status, comes_again, steps, lost or {})


def test_a_killed_rank_is_worth_a_restart_from_the_newest_checkpoint(tmp_path):
    first = attempt(tmp_path / "a", steps=5, checkpoint=4)
    assert plan_restart([first], most=3) == Restart(first.folder)
    second = attempt(tmp_path / "b", steps=6)  # it broke before its first checkpoint
    assert plan_restart([first, second], most=3) == Restart(first.folder)
    third = attempt(tmp_path / "c", steps=9, checkpoint=8)
    assert plan_restart([first, second, third], most=3) == Restart(third.folder)


def test_without_a_checkpoint_it_begins_where_the_first_attempt_began(tmp_path):
    assert plan_restart([attempt(tmp_path / "a", steps=5)], most=1) == Restart(None)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_no_more_restarts_than_allowed(tmp_path, most):
    attempts = [attempt(tmp_path / str(number), steps=number) for number in range(most + 1)]
    assert plan_restart(attempts, most=most) == GiveUp()


@pytest.mark.parametrize(
    ("status", "comes_again"),
    [(0, False), (130, False), (143, False), (1, True), (7, True)],
)
def test_what_was_ordered_or_comes_again_is_not_repeated(tmp_path, status, comes_again):
    assert plan_restart([attempt(tmp_path / "a", steps=5, status=status, comes_again=comes_again)], most=5) == GiveUp()


def test_a_hang_is_worth_a_restart(tmp_path):
    assert plan_restart([attempt(tmp_path / "a", steps=5, status=6)], most=1) == Restart(None)


def test_a_lost_host_is_left_out_once_its_lease_has_surely_run_out(tmp_path):
    lost = {"node2": 1000.0, "node1": 1004.0}
    first = attempt(tmp_path / "a", steps=5, status=7, checkpoint=4, lost=lost)
    assert plan_restart([first], most=2) == Restart(first.folder, ("node1", "node2"), 1024.0, 20.0)
    shorter = Restart(first.folder, ("node1", "node2"), 1012.0, 8.0)
    assert plan_restart([first], most=2, lease_s=3.0) == shorter


def test_a_host_that_was_lost_before_the_last_attempt_may_be_used_again(tmp_path):
    first = attempt(tmp_path / "a", steps=5, status=7, lost={"node1": 1000.0})
    second = attempt(tmp_path / "b", steps=9, status=7, lost={"node2": 2000.0})
    assert plan_restart([first, second], most=2) == Restart(None, ("node2",), 2020.0, 20.0)
    third = attempt(tmp_path / "c", steps=11)
    assert plan_restart([first, second, third], most=3) == Restart(None)


def test_a_rank_that_was_named_before_its_host_was_missed_does_not_shorten_the_wait(tmp_path):
    first = attempt(tmp_path / "a", steps=5, lost={"node1": 1000.0})
    assert plan_restart([first], most=1) == Restart(None, ("node1",), 1020.0, 20.0)


def test_hosts_that_are_lost_without_a_new_step_count_as_no_progress(tmp_path):
    lost = [attempt(tmp_path / name, steps=5, status=7, lost={name: 1.0}) for name in ("a", "b")]
    assert plan_restart(lost, most=9) == Restart(None, ("b",), 21.0, 20.0)
    killed = attempt(tmp_path / "c", steps=4)
    assert plan_restart([*lost, killed], most=9) == GiveUp(no_progress=2)


@pytest.mark.parametrize(
    ("steps", "fruitless"),
    [
        ([8, 8, 8], 2),
        ([8, 6, 7], 2),
        ([8, 9, 9], 0),
        ([8, 9, 9, 9], 2),
        ([0, 0, 0], 2),
        ([8, 8, 9], 0),
        ([8, 8, 9, 9], 0),
    ],
)
def test_two_restarts_without_a_new_step_end_the_attempts(tmp_path, steps, fruitless):
    attempts = [attempt(tmp_path / str(number), steps=done) for number, done in enumerate(steps)]
    expected = GiveUp(no_progress=fruitless) if fruitless else Restart(None)
    assert plan_restart(attempts, most=9) == expected


def test_a_program_that_counts_no_steps_is_restarted_as_often_as_allowed(tmp_path):
    attempts = [attempt(tmp_path / str(number), steps=None) for number in range(4)]
    assert plan_restart(attempts, most=4) == Restart(None)
