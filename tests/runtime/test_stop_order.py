"""The order to stop: whatever step it finds each rank in, all of them leave after the same one."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch import contract
from ttlaunch.agent.stop_marker import leave_stop_marker
from ttlaunch.runtime.stop_order import StopOrder, read_last_step

WAIT_S = 10


class TrainingRank:
    """A rank that asks after every step, from the first one on."""

    def __init__(self, *, steps_done=0):
        self.order = StopOrder(steps_done=steps_done)
        self.step = steps_done

    def train(self, steps):
        """Go on for so many steps at most; says whether it was told to stop."""
        for _ in range(steps):
            if self.order.ends_after(self.step):
                return True
            self.step += 1
        return False


@given(st.integers(0, 50), st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_all_ranks_stop_after_the_largest_step_that_one_of_them_has_begun(steps_done, ahead):
    ranks = [TrainingRank(steps_done=steps_done) for _ in ahead]
    for rank, steps in zip(ranks, ahead, strict=True):
        assert rank.train(steps) is False
    last_step = max(rank.order.freeze() for rank in ranks)
    for rank in ranks:
        rank.order.decide(last_step)
    assert [rank.train(100) for rank in ranks] == [True] * len(ranks)
    assert {rank.step for rank in ranks} == {steps_done + max(ahead)}


def test_a_rank_that_was_told_to_go_on_does_not_stop_after_the_step_it_asked_about():
    order = StopOrder()
    assert order.ends_after(4) is False
    assert order.freeze() == 5
    order.decide(5)
    assert [order.ends_after(4), order.ends_after(5)] == [False, True]


def test_the_answer_is_the_same_however_often_it_is_asked():
    order = StopOrder(steps_done=3)
    order.decide(order.freeze())
    assert [order.ends_after(3) for _ in range(3)] == [True, True, True]


def test_a_frozen_rank_begins_no_step_until_all_have_answered():
    order, answers = StopOrder(), []
    assert order.ends_after(1) is False
    assert order.freeze() == 2
    waiting = threading.Thread(target=lambda: answers.extend([order.ends_after(2), order.ends_after(3)]))
    waiting.start()
    assert order.ends_after(1) is False
    assert answers == []
    order.decide(3)
    waiting.join(WAIT_S)
    assert answers == [False, True]


@pytest.mark.parametrize(("word", "step"), [({"after_step": 7}, 7), ({"after_step": None}, None)])
def test_the_last_step_is_what_the_launcher_left_word_of(tmp_path, word, step):
    assert read_last_step(tmp_path) is None
    leave_stop_marker(str(tmp_path), word)
    assert read_last_step(tmp_path) == step
    assert [path.name for path in tmp_path.iterdir()] == [contract.ENDING_FILE]
