"""A calibration rehearses all ranks of a plan in several copies at once; those end early that are more than the ranks that compute at a time (E9)."""

import pytest

from tests.runtime.calibration.test_rehearsal import rehearsed
from ttlaunch.runtime.calibration import concurrency, rehearsal
from ttlaunch.runtime.calibration.concurrency import Concurrency
from ttlaunch.runtime.comm.virtual_clock import VirtualClock

RANKS = (0, 1, 2)


@pytest.fixture(name="watched")
def watched_ranks(monkeypatch):
    """Return ranks of which the second computes half of the time and the third never, and the clock on the wall."""
    clock, wall = VirtualClock(RANKS), [0.0]
    monkeypatch.setattr(concurrency.time, "monotonic", lambda: wall[0])

    def watch(copy, copies):
        found = Concurrency(clock, RANKS, copy, copies, decides_at=5.0)
        for step in range(8):
            wall[0] = float(step)
            for rank, seconds in ((0, 1.0), (1, 0.5)):
                clock.compute(rank, seconds)
                clock.carry(rank, 1.0 - seconds)
            clock.carry(2, 1.0)
            found.note(0)
        return found

    return watch


def test_the_average_counts_all_ranks_and_only_what_they_compute(watched):
    assert pytest.approx(1.5) == watched(0, 3).at_a_time()


@pytest.mark.parametrize(("copy", "is_spare"), [(0, False), (1, False), (2, True)])
def test_copies_beyond_the_ranks_that_compute_at_a_time_end(watched, copy, is_spare):
    found = watched(copy, 3)

    assert is_spare == found.is_spare
    assert 5.0 == found.counts_from  # beside a copy that has ended since, steps were slower


def test_nothing_changes_if_all_copies_go_on(watched):
    found = watched(1, 2)

    assert (False, 0.0) == (found.is_spare, found.counts_from)


@pytest.mark.parametrize(
    ("recipe", "roles", "goes_on"),
    [
        ("hierarchical_parallel", ["worker", "aggregator_optimizer"], False),
        ("data_parallel", ["worker"] * 2, True),
    ],
)
def test_the_aggregators_core_is_left_idle_as_in_a_run(tmp_path, monkeypatch, recipe, roles, goes_on):
    monkeypatch.setattr(rehearsal, "_DECIDES", 0.0)
    batch = {"batch_size": 32}  # so that the worker computes for longer than the aggregator
    ends = []
    for copy in (0, 1):
        (folder := tmp_path / str(copy)).mkdir()
        ends.append(rehearsed(folder, recipe, roles, steps=9, copy=copy, copies=2, training_config=batch))

    assert [False, not goes_on] == [one["is_spare"] for one in ends]
    assert all(one["steps"] for one in ends[0]["ranks"])
    assert not ends[0]["findings"]
    assert not ends[1]["findings"]
