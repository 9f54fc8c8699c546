"""A rank that a signal has stopped is named in time, also where the others get on without it."""

from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.ranks import Started
from ttlaunch.running.hang.stopped import StoppedWatch
from ttlaunch.running.runs.run_folder import RunFolder, read_events
from ttlaunch.running.watch import Phase, RankState

from .test_hang_watch import RankController


class Lines:
    """A view that keeps what is said."""

    def __init__(self):
        self.said = []

    def output(self, stream, line):
        self.said.append((stream, line.decode()))


class Run:
    """Two ranks, and a clock that moves when it is told to."""

    def __init__(self, folder, *, answers_at_once=True):
        self.now, self.controller, self.view = 100.0, RankController(folder), Lines()
        self.controller.answers_at_once = answers_at_once
        self.ranks = [RankState(RankRow(rank, "box", rank, "worker"), Phase.RUNNING) for rank in (0, 1)]
        self.ranks[1].started = Started(time=1.0, pid=77)
        self.watch = StoppedWatch(RunFolder("run", folder), self.view, self.controller, clock=lambda: self.now)

    def rest(self, seconds):
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            self.watch.notice(self.ranks)
        return self.view.said


STOPPED = ("stderr", "rank 1 (worker, box) was stopped by a signal; `kill -CONT 77` continues it")


def test_a_stopped_rank_is_named_within_seconds_and_once(tmp_path):
    run = Run(tmp_path)
    run.controller.stopped = frozenset({1})
    assert [] == run.rest(5.5)
    assert [STOPPED] == run.rest(1.0)
    assert [STOPPED] == run.rest(60.0)
    run.controller.stopped = frozenset()
    assert [STOPPED, ("stderr", "rank 1 (worker, box) goes on after 1 min 6 s")] == run.rest(1.5)
    assert ["rank_stopped", "rank_goes_on"] == [event["event"] for event in read_events(tmp_path)]


def test_a_rank_that_is_looked_at_for_a_moment_is_none_of_them(tmp_path):
    run = Run(tmp_path)
    for _ in range(5):
        run.controller.stopped = frozenset({0})
        assert [] == run.rest(4.0)
        run.controller.stopped = frozenset()
        assert [] == run.rest(1.0)


def test_other_hosts_are_not_asked_while_ranks_get_on(tmp_path):
    run = Run(tmp_path, answers_at_once=False)
    run.controller.stopped = frozenset({1})
    assert [] == run.rest(60.0)
    assert [] == run.controller.looks
