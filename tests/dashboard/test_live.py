"""What changes in a run is numbered, and whoever comes back misses nothing and counts nothing twice (X3)."""

import random
import shutil

import pytest

from ttlaunch import contract
from ttlaunch.dashboard import live as module
from ttlaunch.dashboard.live import LiveRun
from ttlaunch.dashboard.reading import Reading, UnknownRunError


class Reader:
    """A tab of a browser: it keeps the points that it knows, and may lose its connection at any moment."""

    def __init__(self, live):
        self.start_again(live)

    def start_again(self, live):
        found = live.series("train/loss", first=None, last=None, most=2000)
        self.token, self.number = found["token"], found["number"]
        self.points = [(rank, step) for rank, one in found["ranks"].items() for step in one["steps"]]

    def read(self, live, *, at_most=None):
        for change in live.since(self.token, self.number)[:at_most]:
            if change.kind == "reset":
                self.start_again(live)
                return
            self.number = change.number
            if change.kind == "points":
                self.points += [(str(row[1]), row[2]) for row in change.content["points"] if row[0] == "train/loss"]


def test_a_reader_that_comes_and_goes_has_every_point_once_also_after_the_server_was_killed(make_run):
    run = make_run()
    run.steps(1, 3)
    live, drawn = LiveRun(run.path), random.Random(5)  # noqa: S311 - a test repeats itself
    reader = Reader(live)
    for step in range(4, 60):
        run.steps(step, step)
        if drawn.random() < 0.1:
            live = LiveRun(run.path)  # another server
        if drawn.random() < 0.7:
            live.poll()
        if drawn.random() < 0.6:
            reader.read(live, at_most=drawn.choice([1, 2, None]))
    live.poll()
    while reader.number < live.last or reader.token != live.token:
        reader.read(live)

    assert sorted(reader.points) == sorted((rank, step) for rank in ("0", "1") for step in range(1, 60))


def test_a_reader_that_was_away_for_too_long_is_told_to_ask_again(make_run, monkeypatch):
    monkeypatch.setattr(module, "_KEPT", 4)
    run = make_run()
    live = LiveRun(run.path)
    reader = Reader(live)
    for step in range(1, 20):
        run.steps(step, step)
        live.poll()

    assert ["reset"] == [change.kind for change in live.since(reader.token, reader.number)]
    assert ["reset"] == [change.kind for change in live.since("another", live.last)]
    assert [] == live.since(live.token, live.last)


def test_many_new_points_at_once_are_a_reset_and_not_an_event_of_any_size(make_run):
    run = make_run()
    live = LiveRun(run.path)
    first = live.last
    run.steps(1, 2000)
    live.poll()

    assert "reset" == next(change.kind for change in live.since(live.token, first))


def test_the_end_of_a_run_is_a_change(make_run):
    run = make_run()
    run.steps(1, 2)
    live = LiveRun(run.path)
    before = live.last
    run.end(status="failed")
    live.poll()

    assert "facts" in [change.kind for change in live.since(live.token, before)]


def test_readers_of_one_run_share_what_was_read_a_moment_ago(make_run):
    run = make_run()
    live = LiveRun(run.path)
    before = live.last
    run.steps(1, 2)

    assert not live.poll(every_s=3600)
    assert before == live.last
    assert live.poll()
    assert "points" in [change.kind for change in live.since(live.token, before)]


def test_a_folder_that_has_become_another_run_or_was_copied_anew_shows_none_of_the_former_numbers(make_run):
    run = make_run()
    run.steps(1, 9)
    reading = Reading(run.path.parent)

    def steps():
        found = reading.live(run.path.name).series("train/loss", first=None, last=None, most=99)
        return found["ranks"]["0"]["steps"]

    former = reading.live(run.path.name)
    assert [*range(1, 10)] == steps()
    assert former is reading.live(run.path.name)

    for path in (run.path / contract.RECORDS_DIR).iterdir():
        path.write_text("")  # an earlier state of the run, copied over a later one
    run.steps(1, 2)
    assert [1, 2] == steps()
    assert former.is_replaced

    shutil.rmtree(run.path)
    with pytest.raises(UnknownRunError):
        steps()
    make_run().steps(1, 20)
    assert [*range(1, 21)] == steps()
