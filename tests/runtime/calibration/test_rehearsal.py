"""Ranks that are rehearsed in turns have the steps that they would have side by side (E9)."""

import statistics

import pytest
import torch

from tests.runtime.test_predict import tiny_world
from ttlaunch.app import calibrate
from ttlaunch.runtime.calibration import rehearsal
from ttlaunch.runtime.calibration.rehearsal import MessageCosts, rehearse
from ttlaunch.runtime.comm.virtual_clock import VirtualClock

FREE = MessageCosts(0.0, 0.0, 1e12)


def rehearsed(tmp_path, name, roles, *, link=FREE, steps=9, copy=0, copies=1, **changed):
    changed["training_config"] = {**changed.get("training_config", {}), "steps": steps}
    world = tiny_world(name, roles, **changed)
    return rehearse(world, link, seconds=60.0, folder=tmp_path, copy=copy, copies=copies)


def median(rank, part):
    return statistics.median(step[part] for step in rank["steps"])


def test_two_ranks_that_share_a_step_make_half_of_its_passes_each(tmp_path):
    alone = rehearsed(tmp_path, "data_parallel", ["trainer"], training_config={"batch_size": 16})["ranks"][0]
    (tmp_path / "two").mkdir()
    both = rehearsed(tmp_path / "two", "data_parallel", ["worker"] * 2, training_config={"batch_size": 16})["ranks"]

    assert 16 == median(alone, "passes")
    assert [8, 8] == [median(one, "passes") for one in both]


def test_the_parts_of_a_step_add_up_to_it(tmp_path):
    for one in rehearsed(tmp_path, "hierarchical_parallel", ["worker", "aggregator_optimizer"])["ranks"]:
        for step in one["steps"]:
            assert step["all_s"] == pytest.approx(sum(step["phases"].values()), abs=1e-4)


def test_the_time_of_messages_is_that_of_the_link(tmp_path):
    ranks = rehearsed(tmp_path, "data_parallel", ["worker"] * 2, link=MessageCosts(5.0, 5.0, 1e12), steps=8)["ranks"]

    assert min(median(one, "exposed_s") for one in ranks) >= 5
    for one in ranks:  # half of it at each end
        for step in one["steps"]:
            assert step["exposed_s"] / 2.5 == pytest.approx(round(step["exposed_s"] / 2.5))


def test_a_message_right_after_another_one_costs_less(tmp_path):
    """Such as when a tensor goes to several ranks: the code that sends it is still in the caches."""
    first = rehearsed(tmp_path, "zero", ["worker"] * 3, link=MessageCosts(2.0, 0.0, 1e12), steps=8)["ranks"]
    (tmp_path / "again").mkdir()
    again = rehearsed(tmp_path / "again", "zero", ["worker"] * 3, link=MessageCosts(0.0, 2.0, 1e12), steps=8)["ranks"]

    for one, other in zip(first, again, strict=True):
        assert 0 < median(one, "exposed_s") < median(other, "exposed_s")


def test_a_rank_that_has_waited_for_a_message_receives_it_at_the_lower_price():
    """It has looked for it again and again, so the code that takes it is in its caches."""
    clock = VirtualClock((0,))
    timing = rehearsal._Timing(lambda: 0.0, 0.0, 0.0, lambda: None)
    rank = rehearsal._TimedRank(0, clock, timing=timing, concurrency=None, costs=MessageCosts(2.0, 0.5, 1e12))

    for waited_s, cost_s in ((0.0, 1.0), (3.0, 0.25)):
        rank._since, rank._computed_s = 0.0, 1.0
        rank.begin_wait()
        clock.carry(0, waited_s)
        before_s = clock.now_s(0)
        rank.has_received(torch.zeros(0))
        assert cost_s == clock.now_s(0) - before_s


def test_who_receives_a_message_copies_it_and_computes_nothing_meanwhile(tmp_path):
    """The exchange of gradients overlaps with the backward pass, but no core does both at once."""
    slow = rehearsed(tmp_path, "data_parallel", ["worker"] * 2, link=MessageCosts(0.0, 0.0, 1000.0), steps=8)["ranks"]
    (tmp_path / "fast").mkdir()
    fast = rehearsed(tmp_path / "fast", "data_parallel", ["worker"] * 2, link=MessageCosts(0.0, 0.0, 2000.0), steps=8)[
        "ranks"
    ]

    for one, other in zip(slow, fast, strict=True):
        assert median(one, "exposed_s") == pytest.approx(2 * median(other, "exposed_s"))
        assert median(one, "exposed_s") > 1  # 10 kB or more


def test_a_rank_is_charged_with_what_the_same_piece_took_some_time_ago(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rehearsal.time, "monotonic", lambda: now[0])
    echo = rehearsal._Echo(1.0)
    charged = []
    for step in range(5):
        now[0] = 0.5 * step
        echo.begin_step()
        charged.append([echo.instead_of(10 * step + piece) for piece in range(2 + (step == 4))])

    assert [[0, 1], [10, 11], [0, 1], [10, 11], [20, 21, 42]] == charged  # a piece that was not there then is as it is


def test_the_first_rank_is_charged_with_what_its_pieces_take():
    echo = rehearsal._Echo(0.0)
    for took in (3.0, 5.0):
        echo.begin_step()
        assert took == echo.instead_of(took)


def test_no_rank_is_charged_with_times_older_than_what_counts():
    """Otherwise the last ones of many would be charged with what they take now, and be slow together."""
    ago_s = [rehearsal._ago_s(rank) for rank in range(11)]

    assert (0.0, 0.0) == (ago_s[0], ago_s[10])
    assert ago_s[9] == max(ago_s) < 0.75 * calibrate._SECONDS
    assert 10 == len(set(ago_s))


def test_too_few_steps_are_a_finding(tmp_path):
    found = rehearsed(tmp_path, "data_parallel", ["trainer"], steps=1)

    assert ["no rank has done 4 steps within 120 s"] == found["findings"]
