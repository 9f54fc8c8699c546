"""A long run is shown from the ends of its files at once, and as a whole once it was read; nothing differs from a run read as a whole (X7)."""

import json
import os
import time

import pytest

from tests.dashboard.made_run import MadeRun
from ttlaunch import contract
from ttlaunch.dashboard import cache as caches
from ttlaunch.dashboard.cache import Cache
from ttlaunch.dashboard.catalogue import Catalogue
from ttlaunch.dashboard.facts import run_as_json
from ttlaunch.dashboard.live import LAST_STEPS, LiveRun
from ttlaunch.dashboard.make_index import make_index

STEPS = 3 * LAST_STEPS


@pytest.fixture
def run(make_run):
    run = make_run()
    run.record(0, kind="ready", time=1e9, total_steps=STEPS)
    run.steps(1, STEPS)
    run.telemetry(40)
    return run


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def index(run, cache):
    place = cache.place_of(run.path)
    place.mkdir(parents=True, exist_ok=True)
    make_index(run.path, place, parent=os.getppid())


def numbers_of(live):
    return {
        name: live.series(name, first=None, last=None, most=2000)["ranks"]
        | live.series(name, first=70, last=90, most=9)
        for name in live.names()["names"]
    }


def without_ids(numbers):
    return {
        name: {key: one for key, one in found.items() if key not in {"token", "number"}}
        for name, found in numbers.items()
    }


def test_before_a_long_run_was_read_its_last_steps_are_shown_without_a_speed(run, cache, monkeypatch):
    monkeypatch.setattr(cache, "make", lambda _: True)  # never ready
    live = LiveRun(run.path, cache, long_bytes=1000)
    found = live.series("train/loss", first=None, last=None, most=2000)["ranks"]["1"]
    assert list(range(STEPS - LAST_STEPS + 1, STEPS + 1)) == found["steps"]
    assert [4.0 / step + 1 / 7 for step in found["steps"]] == found["values"]
    state = live.states[0]
    assert (STEPS, STEPS) == (state.step, state.total_steps)
    assert state.tokens_per_s is None or 200.0 == pytest.approx(state.tokens_per_s)
    assert live.names()["reading"] == 0.0


@pytest.mark.parametrize("added", [0, 500])
def test_a_long_run_that_was_read_has_the_numbers_and_states_of_one_read_as_a_whole_also_after_it_has_grown(
    run, cache, added
):
    index(run, cache)
    run.steps(STEPS + 1, STEPS + added)
    if added:
        run.telemetry(60)
    live, whole = LiveRun(run.path, cache, long_bytes=1000), LiveRun(run.path)
    assert live.is_long
    assert not live.is_partial
    assert without_ids(numbers_of(whole)) == without_ids(numbers_of(live))
    names = ("step", "total_steps", "loss", "tokens_per_s", "phase", "first_step")
    assert [[getattr(one, name) for name in names] for one in whole.states] == [
        [getattr(one, name) for name in names] for one in live.states
    ]


def test_the_facts_of_a_long_run_that_was_read_are_those_of_one_read_as_a_whole(run, cache):
    run.end()
    index(run, cache)
    live = LiveRun(run.path, cache, long_bytes=1000)
    kept = run_as_json(run.path, ranks=live.states, measured=cache.measured(run.path))
    assert json.loads(json.dumps(run_as_json(run.path))) == json.loads(json.dumps(kept))


def test_only_the_points_that_came_after_the_cache_are_in_memory(run, cache):
    index(run, cache)
    run.steps(STEPS + 1, STEPS + 2)
    live = LiveRun(run.path, cache, long_bytes=1000)
    assert 2 * 2 * 5 == live._numbers.count  # two ranks, two steps, five numbers of a step


def test_a_run_that_is_opened_is_read_by_a_process_and_its_readers_are_told_when_it_was(run, cache):
    live = LiveRun(run.path, cache, long_bytes=1000)
    token, number = live.token, live.last
    assert live.is_partial
    until = time.monotonic() + 60
    while live.is_partial and time.monotonic() < until:
        time.sleep(0.1)
        live.poll()
    assert not live.is_partial
    assert "reset" == live.since(token, number)[0].kind
    assert STEPS == live.series("train/loss", first=None, last=None, most=2000)["ranks"]["0"]["points"]
    assert not [path for path in run.path.rglob("*") if "points" in path.name]
    cache.end()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 1}', '{"format": 1, "place": {}, "points": "x", "blocks": [[1]]}']
)
def test_a_cache_that_is_broken_counts_as_none(run, cache, content):
    index(run, cache)
    (cache.place_of(run.path) / caches.INDEX_FILE).write_text(content)
    assert cache.index(run.path) is None


def test_a_run_whose_files_were_replaced_by_shorter_ones_is_read_anew(run, cache):
    index(run, cache)
    path = run.path / contract.progress_file(0)
    path.write_bytes(path.read_bytes()[:5000])
    assert cache.index(run.path) is None


def test_the_newest_runs_come_first_while_there_is_no_time_for_all_and_the_next_page_finds_them_kept(tmp_path):
    folder, kept = tmp_path / "runs", tmp_path / "kept.json"
    for number in range(40):
        MadeRun(folder / f"2026-01-01T00-{number:02}-00-aaaa").end()
    catalogue = Catalogue(folder, kept)
    first = catalogue.as_json(most_s=0)
    assert 24 == first["pending"]
    assert "2026-01-01T00-39-00-aaaa" == first["runs"][0]["run_id"]
    assert 16 == len(first["runs"])
    every = catalogue.as_json(most_s=60)
    assert (0, 40) == (every["pending"], len(every["runs"]))
    assert every == Catalogue(folder, kept).as_json(most_s=-1)
