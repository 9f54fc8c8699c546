"""When a run is started again: only if it may end otherwise, and only while it gets further."""

import pytest

from ttlaunch.launch.restarts import Attempt, GiveUp, Restart, plan_restart


def attempt(folder, *, steps, status=1, code="R004", checkpoint=None):
    folder.mkdir(parents=True)
    if checkpoint is not None:
        (folder / f"checkpoints/step-{checkpoint}").mkdir(parents=True)
    return Attempt(folder, status, code, steps)


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
    ("status", "code"),
    [(0, None), (130, None), (143, None), (7, "R012"), (1, "R009"), (1, "R011"), (1, "R025"), (1, "R010")],
)
def test_what_was_ordered_or_comes_again_is_not_repeated(tmp_path, status, code):
    assert plan_restart([attempt(tmp_path / "a", steps=5, status=status, code=code)], most=5) == GiveUp()


def test_a_hang_is_worth_a_restart(tmp_path):
    assert plan_restart([attempt(tmp_path / "a", steps=5, status=6, code="R013")], most=1) == Restart(None)


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
    attempts = [attempt(tmp_path / str(number), steps=None, code="R003") for number in range(4)]
    assert plan_restart(attempts, most=4) == Restart(None)
