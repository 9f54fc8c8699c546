"""Faults are made at their moments, once, in what is there, and stand in the run's history."""

import os
import signal
import subprocess

import pytest

from tests.running.membership.memory import FINGERPRINT, MemoryMembers
from ttlaunch.diagnostics import Source
from ttlaunch.lab.chaos.inject import Injector
from ttlaunch.planning.fault_parser import parse_faults
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.endings import RankExit
from ttlaunch.records.ranks import Started
from ttlaunch.running.membership.members import Worker
from ttlaunch.running.membership.service import serving
from ttlaunch.running.runs.run_folder import RunFolder, append_event, read_events, scratch_folder
from ttlaunch.running.watch import Phase, RankState


class RankController:
    """Writes down what it is told to do."""

    def __init__(self):
        self.done = []

    def signal_ranks(self, ranks, number, *, marker=None):
        self.done.append(([state.row.rank for state in ranks], signal.Signals(number).name))

    def cut(self, host):
        self.done.append(host)

    def add(self, ranks):
        self.done.append([state.row.rank for state in ranks])


class View:
    def __init__(self):
        self.ticks = 0

    def tick(self, ranks):
        self.ticks += 1


STARTED = Started(time=1.0, pid=1, shim_pid=1)


class Scene:
    def __init__(self, folder, plan, *, mpirun):
        self.folder, self.controller, self.view = RunFolder("run-1", folder), RankController(), View()
        faults, found = parse_faults(Source("--plan", plan))
        assert [] == found
        roles = [("a", "worker"), ("a", "worker"), ("b", "server")]
        self.ranks = [RankState(RankRow(rank, host, 0, role)) for rank, (host, role) in enumerate(roles)]
        for state in self.ranks:
            state.started = STARTED
        append_event(self.folder, "start", mpirun=mpirun)
        self.injector = Injector(faults, view=self.view, controller=self.controller, folder=self.folder, scratch=folder)

    def tick(self):
        self.injector.tick(self.ranks)
        return self.controller.done

    def history(self):
        return [{k: v for k, v in event.items() if k != "time"} for event in read_events(self.folder.path)[1:]]


@pytest.fixture
def scene(tmp_path):
    """`scene(plan)`: a run of three ranks that has just begun, whose mpirun is this process."""
    return lambda plan, *, mpirun=None: Scene(tmp_path, plan, mpirun=mpirun or os.getpid())


def test_a_fault_waits_for_the_step_of_its_rank_and_is_made_once(scene):
    run = scene("kill rank=1 at step=5")
    run.ranks[0].step = 9
    assert [] == run.tick()
    run.ranks[1].step = 6
    assert [([1], "SIGKILL")] == run.tick()
    assert [([1], "SIGKILL")] == run.tick()
    assert [{"event": "fault", "index": 0, "fault": "kill rank=1 at step=5", "step": 6, "ranks": [1]}] == run.history()
    assert 3 == run.view.ticks


def test_a_role_and_a_host_are_all_their_ranks_and_the_furthest_counts(scene):
    run = scene("stop role=worker at step=5; cut host=b at step=7; segv host=a at step=7")
    run.ranks[1].step = 5
    assert [([0, 1], "SIGSTOP")] == run.tick()
    run.ranks[2].step = 7
    assert "b" == run.tick()[-1]
    run.ranks[0].step = 7
    assert ([0, 1], "SIGSEGV") == run.tick()[-1]


def test_what_has_not_begun_is_waited_for_and_what_has_ended_is_left_out(scene):
    run = scene("kill role=worker at 0s")
    run.ranks[0].started = None
    assert [] == run.tick()
    run.ranks[0].started, run.ranks[1].exit = STARTED, RankExit(status=0)
    assert [([0], "SIGKILL")] == run.tick()


def test_a_rank_that_has_ended_is_missed_with_the_reason(scene):
    run = scene("kill rank=2 at 0s; kill role=worker at 0s")
    for state in run.ranks:
        state.exit = RankExit(status=0)
    assert [] == run.tick()
    assert [("fault_missed", 0, "rank 2 had ended"), ("fault_missed", 1, "its ranks had ended")] == [
        (event["event"], event["index"], event["reason"]) for event in run.history()
    ]


def test_nothing_is_made_once_mpirun_has_ended(scene):
    dead = subprocess.Popen(["true"])
    dead.wait()
    run = scene("kill rank=2 at 0s; interrupt at 0s", mpirun=dead.pid)
    assert [] == run.tick()
    assert [] == run.history()


def test_join_starts_the_next_worker_that_has_not_been_there(scene):
    run = scene("join at 0s; join at 0s")
    run.ranks.append(RankState(RankRow(3, "a", 0, "worker", later=True), Phase.ABSENT))
    assert [[3], [3]] == run.tick()  # this controller starts nothing, so the row stays free
    run.ranks.pop()
    late = scene("join at 0s")
    late.tick()
    assert ("fault_missed", "every row of the plan has been started") == tuple(
        late.history()[-1][name] for name in ("event", "reason")
    )


def test_a_worker_cannot_join_on_a_host_that_is_lost(scene):
    run = scene("join at 0s")
    run.ranks.append(RankState(RankRow(3, "b", 0, "worker", later=True), Phase.ABSENT))

    def add(ranks):
        raise ValueError(f"rank {ranks[0].row.rank} cannot start: host b is lost")

    run.controller.add = add
    run.tick()
    assert ("fault_missed", "rank 3 cannot start: host b is lost") == tuple(
        run.history()[-1][name] for name in ("event", "reason")
    )


def test_leave_asks_the_coordinator_of_the_run_as_its_owner_does(scene):
    run, members = scene("leave rank=1 at 0s; leave rank=2 at 0s"), MemoryMembers()
    members.known[1] = Worker(1, 0, 0, "10.0.0.1", 7000, state="training", step=4)
    with scratch_folder() as scratch:
        with serving(
            members, described={}, fingerprint=lambda: FINGERPRINT, authority=None, folder=run.folder, scratch=scratch
        ):
            assert [] == run.tick()
        assert "asked to leave" == members.known[1].left
    faults = [(event["event"], event["index"]) for event in run.history()]
    assert [("fault", 0), ("fault", 1), ("fault_missed", 1)] == faults  # the run has no worker 2
    assert "worker-0002" in run.history()[-1]["reason"]


def test_an_interrupt_and_a_sigterm_come_to_this_process(scene):
    came = []
    before = {
        number: signal.signal(number, lambda got, _: came.append(got)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        scene("interrupt at 0s; term launcher at 0s").tick()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert [signal.SIGINT, signal.SIGTERM] == sorted(came)
