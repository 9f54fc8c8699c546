"""Ranks that are rehearsed in turns have the steps that they would have side by side (E9)."""

import statistics

import pytest

from tests.runtime.test_predict import tiny_world
from ttlaunch.runtime.calibration.rehearsal import rehearse
from ttlaunch.runtime.comm.virtual_clock import Link

FREE = Link(0.0, 1e12)


def rehearsed(tmp_path, name, roles, *, link=FREE, steps=9, **changed):
    changed["training_config"] = {**changed.get("training_config", {}), "steps": steps}
    return rehearse(tiny_world(name, roles, **changed), link, seconds=60.0, folder=tmp_path)


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
    ranks = rehearsed(tmp_path, "data_parallel", ["worker"] * 2, link=Link(5.0, 1e12), steps=8)["ranks"]

    assert min(median(one, "exposed_s") + median(one, "waiting_s") for one in ranks) >= 5


def test_too_few_steps_are_a_finding(tmp_path):
    found = rehearsed(tmp_path, "data_parallel", ["trainer"], steps=1)

    assert ["no rank has done 4 steps within 120 s"] == found["findings"]
