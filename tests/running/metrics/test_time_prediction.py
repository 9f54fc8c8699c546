"""The time of a step, from what copies of its ranks have measured (E9)."""

import json

import pytest

from ttlaunch.records.calibration import RehearsalEnd, RehearsedRank, RehearsedStep
from ttlaunch.running.metrics.time_prediction import (
    Interval,
    keep,
    kept_file,
    key_of,
    predicted_time,
    settle_rehearsal,
    time_of,
)


def step(all_ms, *, waits_ms=1.0, busy=1.0):
    computing = all_ms - waits_ms
    return RehearsedStep(
        all_s=all_ms / 1e3,
        exposed_s=0.0,
        waiting_s=waits_ms / 1e3,
        phases={"forward": computing / 2e3, "backward": computing / 4e3, "exchange": (computing / 4 + waits_ms) / 1e3},
        elapsed_s=computing * busy / 1e3,
        passes=4,
    )


def copy(*ranks, findings=()):
    rows = tuple(RehearsedRank(role="worker", steps=tuple(steps)) for steps in ranks)
    return RehearsalEnd(ranks=rows, link=None, findings=findings)


def plan(tmp_path, *, ranks=1, **config):
    (tmp_path / "recipe").mkdir(exist_ok=True)
    return {
        "recipe": {"name": "own", "folder": str(tmp_path / "recipe")},
        "config": {"training_config": {"steps": 5, "batch_size": 8, **config}},
        "ranks": [{"rank": rank, "role": "worker", "host": "localhost", "local_rank": rank} for rank in range(ranks)],
    }


STEADY = [10.0, 11.0, 10.0, 11.0, 10.0, 11.0, 11.0, 10.0, 10.0, 11.0, 11.0]


def test_a_step_takes_the_median_of_all_copies_and_an_outlier_changes_nothing(tmp_path):
    found = settle_rehearsal([copy(map(step, STEADY)), copy([*map(step, STEADY), step(500.0)])])
    time = time_of(found, plan(tmp_path), cores=2)

    assert pytest.approx(0.011) == time.step.median
    assert (23, 2) == (found.steps, found.copies)
    (rank,) = time.ranks
    assert pytest.approx(0.001) == rank.waiting.median
    assert pytest.approx(0.010) == rank.computing_s
    assert pytest.approx(0.005) == rank.phases["forward"].median


def test_the_upper_end_of_a_busy_machine_is_by_the_clock_on_the_wall(tmp_path):
    found = settle_rehearsal([copy([step(one, busy=2.0) for one in STEADY])])
    time = time_of(found, plan(tmp_path))

    assert pytest.approx(2.0) == found.busy
    assert pytest.approx((0.011, 0.021)) == (time.step.median, time.step.high)


@pytest.mark.parametrize(
    ("copies", "reason"),
    [
        ([copy(map(step, [10.0, 20.0] * 8))], "the medians of every second step and of the others differ by 67%"),
        (
            [copy(map(step, [10.0, 10.0, 40.0, 40.0] * 8))],
            "a tenth of the steps took up to 10.0 ms, and a tenth 40.0 ms or more",
        ),
        ([copy([], findings=("no rank has done 4 steps within 8 s",))], "no rank has done 4 steps within 8 s"),
    ],
)
def test_a_calibration_whose_steps_do_not_agree_is_useless(copies, reason):
    assert reason == settle_rehearsal(copies)


def test_of_ranks_that_outnumber_the_cores_only_the_interval_is_known(tmp_path):
    found = settle_rehearsal([copy(*(map(step, STEADY) for _ in range(4)))])
    time = time_of(found, plan(tmp_path, ranks=4), cores=2)

    assert time.is_wide
    assert pytest.approx(4 * 0.010 / 2) == time.step.low  # all computing, on two cores
    assert time.step.high >= 4 * 0.010 / 2 + 0.010


def test_a_calibration_is_kept_for_the_same_work_and_for_no_other(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert predicted_time(plan(tmp_path), environment) is None
    keep(plan(tmp_path), settle_rehearsal([copy(map(step, STEADY))]), environment)

    found = predicted_time(plan(tmp_path, steps=1000, learning_rate=0.1), environment)
    assert Interval(0.010, 0.011, 0.011) == found.step
    assert predicted_time(plan(tmp_path, batch_size=16), environment) is None
    (tmp_path / "recipe" / "trainer.py").write_text("changed = True\n")
    assert predicted_time(plan(tmp_path), environment) is None


@pytest.mark.parametrize("content", ["", "{}", '{"format": 1, "host": "", "release": "", "plans": {"KEY": {}}}'])
def test_a_kept_file_that_makes_no_sense_is_no_calibration(tmp_path, content):
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    kept_file(environment).parent.mkdir(parents=True)
    kept_file(environment).write_text(content.replace("KEY", key_of(plan(tmp_path))))

    assert predicted_time(plan(tmp_path), environment) is None


def test_a_kept_interval_has_three_numbers(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    keep(plan(tmp_path), settle_rehearsal([copy(map(step, STEADY))]), environment)
    content = json.loads(kept_file(environment).read_text())
    next(iter(content["plans"].values()))["ranks"][0]["parts"]["step"] = [0.01]
    kept_file(environment).write_text(json.dumps(content))

    assert predicted_time(plan(tmp_path), environment) is None
