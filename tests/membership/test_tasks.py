"""Which worker of a server has which tasks: each is handed out until its gradient has come, whoever ends meanwhile."""

import pytest

from ttlaunch.membership.tasks import TaskList, TasksInHand


@pytest.fixture
def in_hand():
    """Two workers with two tasks each, of six."""
    found = TasksInHand(TaskList(done=0, last=6))
    found.begin_epoch([1, 2])
    assert ([1, 2], [3, 4]) == (found.hand_out(1, count=2), found.hand_out(2, count=2))
    return found


def test_tasks_of_a_worker_that_is_gone_come_before_all_others(in_hand):
    in_hand.close(1, 1)
    in_hand.begin_epoch([1, 5])
    assert 2 == in_hand.handed_out_again
    assert ([3, 4], [5]) == (in_hand.hand_out(5, count=2), in_hand.hand_out(1))


def test_tasks_in_an_answer_that_was_lost_are_handed_out_again_and_count_as_no_loss(in_hand):
    in_hand.begin_epoch([1, 2])
    assert (False, 0) == in_hand.meet(1, wanted=2, pushed=0, others=[1, 0])  # it has never heard of task 2
    assert ([2], 0) == (in_hand.hand_out(1), in_hand.handed_out_again)


def test_a_gradient_is_sent_again_until_it_is_applied(in_hand):
    assert (True, 0) == in_hand.meet(1, wanted=2, pushed=1, others=[2])
    in_hand.close(1, 1)
    assert (False, 1) == in_hand.meet(1, wanted=2, pushed=1, others=[2])  # it has got no answer to it
    assert (False, True) == (in_hand.is_awaited(1, 1), in_hand.is_awaited(1, 2))


def test_a_worker_without_any_task_gets_as_many_as_it_wants(in_hand):
    in_hand.begin_epoch([1, 2, 5])
    assert (False, 2) == in_hand.meet(5, wanted=2, pushed=0, others=[0, 0])
    # It has got no answer to a gradient that was applied, and nothing else.
    in_hand.close(2, 3)
    in_hand.begin_epoch([1, 2, 5])
    assert (False, 1) == in_hand.meet(2, wanted=2, pushed=3, others=[0, 0])


def test_a_worker_that_names_tasks_of_another_one_is_refused(in_hand):
    with pytest.raises(ValueError, match=r"worker 2 says that it has the tasks \[1, 3\], and got \[3, 4\]"):
        in_hand.meet(2, wanted=2, pushed=0, others=[1, 3])


def test_a_worker_waits_only_without_a_task_of_its_own_and_only_while_steps_are_left(in_hand):
    assert [5, 6, 0] == in_hand.hand_out(1, count=3)
    in_hand.close(2, 3)
    assert [0] == in_hand.hand_out(2)  # it still has task 4
    in_hand.close(2, 4)
    assert (None, False) == (in_hand.hand_out(2), in_hand.has_more)
    in_hand.is_ending = True
    assert ([0], True) == (in_hand.hand_out(2), in_hand.has_more)
