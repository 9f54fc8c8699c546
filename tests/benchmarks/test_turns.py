"""Steps of ranks that compute in turns, without the time in which they were stopped."""

import pytest

from benchmarks import turns
from benchmarks.turns import TimedRank, pooled, steps_in_turns
from ttlaunch.running.metrics.telemetry import RankTelemetry

TURNS = [(100.0, 101.0), (102.0, 103.0), (104.0, 105.0), (106.0, 107.0)]


def timed(steps, *, first=1 + turns._WARM_UP):
    """Return what a rank's steps took in turns; each is given by its begin and its end."""
    known = {first + place: one for place, one in enumerate(steps)}
    telemetry = RankTelemetry(0, steps={step: round(1e6 * (end - begin)) for step, (begin, end) in known.items()})
    telemetry.steps |= dict.fromkeys(range(1, first), 1)
    telemetry.phases["forward"] = {step: round(1e6 * (end - begin)) // 2 for step, (begin, end) in known.items()}
    ends = dict.fromkeys(range(1, first), 99.0) | {step: end for step, (_, end) in known.items()}
    return steps_in_turns(telemetry, ends, TURNS)


def test_a_step_counts_without_the_time_between_two_turns():
    found = timed([(100.8, 102.1)])

    assert ([pytest.approx(0.3)], []) == found.steps
    assert {} == found.phases  # of a step that is cut, nobody knows which phase was


def test_every_second_step_is_in_one_half():
    found = timed([(100.1, 100.3), (102.2, 102.6), (104.1, 104.2), (106.0, 106.5)])

    assert ([pytest.approx(0.2), pytest.approx(0.1)], [pytest.approx(0.4), pytest.approx(0.5)]) == found.steps
    assert pytest.approx(0.3) == found.median
    assert {"forward": pytest.approx(0.15)} == found.phases


def test_steps_before_the_first_turn_and_after_the_last_one_do_not_count():
    assert ([], []) == timed([(99.9, 100.1), (106.9, 107.1)]).steps


def test_cut_steps_count_only_where_whole_ones_are_few():
    """The caches of a rank that was stopped are empty, so a step that is cut takes longer."""
    whole = [(begin + 0.04 * place, begin + 0.04 * place + 0.03) for begin, _ in TURNS for place in range(20)]
    steps = sorted([*whole, (100.95, 102.35)])

    assert all(one == pytest.approx(0.03) for half in timed(whole).steps for one in half)
    assert 80 == sum(map(len, timed(steps).steps))
    assert 5 == sum(map(len, timed([*whole[:4], (100.95, 102.35)]).steps))


def test_steps_of_several_runs_count_together_and_of_phases_the_mean():
    one, other = [TimedRank(0, ([0.1], [0.2]), {"forward": 0.1})], [TimedRank(0, ([0.3, 0.4], []), {"forward": 0.3})]

    [found] = pooled([one, other])

    assert ([0.1, 0.3, 0.4], [0.2]) == found.steps
    assert {"forward": pytest.approx(0.2)} == found.phases


def test_a_run_that_has_measured_nothing_leaves_nothing():
    assert [] == pooled([[TimedRank(0, ([0.1], [0.2]), {})], []])
