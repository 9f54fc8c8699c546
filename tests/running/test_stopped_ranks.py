"""A rank that a signal has stopped is named in time, also where the others get on without it."""

from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.ranks import Started
from ttlaunch.running.hang.stopped import StoppedWatch
from ttlaunch.running.runs.run_folder import RunFolder, read_events
from ttlaunch.running.watch import Phase, RankState

from .test_hang_watch import Crew


class Lines:
    """A view that keeps what is said."""

    def __init__(self):
        self.said = []

    def output(self, stream, line):
        self.said.append((stream, line.decode()))


class Run:
    """Two ranks, and a clock that moves when it is told to."""

    def __init__(self, folder, *, looks_at_once=True):
        self.now, self.crew, self.view = 100.0, Crew(folder), Lines()
        self.crew.looks_at_once = looks_at_once
        self.ranks = [RankState(RankRow(rank, "box", rank, "worker"), Phase.RUNNING) for rank in (0, 1)]
        self.ranks[1].started = Started(time=1.0, pid=77)
        self.watch = StoppedWatch(RunFolder("run", folder), self.view, self.crew, clock=lambda: self.now)

    def rest(self, seconds):
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            self.watch.notice(self.ranks)
        return self.view.said


STOPPED = ("stderr", "rank 1 (worker, box) was stopped by a signal; `kill -CONT 77` lets it go on")


def test_a_stopped_rank_is_named_within_seconds_and_once(tmp_path):
    run = Run(tmp_path)
    run.crew.stopped = frozenset({1})
    assert [] == run.rest(5.5)
    assert [STOPPED] == run.rest(1.0)
    assert [STOPPED] == run.rest(60.0)
    run.crew.stopped = frozenset()
    assert [STOPPED, ("stderr", "rank 1 (worker, box) goes on after 66 s")] == run.rest(1.5)
    assert ["rank_stopped", "rank_goes_on"] == [event["event"] for event in read_events(tmp_path)]


def test_a_rank_that_is_looked_at_for_a_moment_is_none_of_them(tmp_path):
    run = Run(tmp_path)
    for _ in range(5):
        run.crew.stopped = frozenset({0})
        assert [] == run.rest(4.0)
        run.crew.stopped = frozenset()
        assert [] == run.rest(1.0)


def test_other_hosts_are_not_asked_while_ranks_get_on(tmp_path):
    run = Run(tmp_path, looks_at_once=False)
    run.crew.stopped = frozenset({1})
    assert [] == run.rest(60.0)
    assert [] == run.crew.looks
