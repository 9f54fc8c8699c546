"""Ranks of a script that train a model each: when the user is warned, and when the run fails for it."""

from types import SimpleNamespace

import pytest

from ttlaunch.planning.launch_plan import CommandProgram, RankRow
from ttlaunch.records.endings import RankExit
from ttlaunch.records.ranks import JoinedGroup, TrainsAlone
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.single_trainings import SingleTrainingWatch, single_trainings
from ttlaunch.running.watch import RankState, fold

SCRIPT = CommandProgram("train", ("python", "train.py"), is_python=True, uses_mpi=False)


class Run:
    """Ranks of a script, and a clock that moves when it is told to."""

    def __init__(self, folder, program=SCRIPT, *, world_size=2):
        self.now, self.said = 1000.0, []
        self.plan = SimpleNamespace(program=program, world_size=world_size)
        self.ranks = [RankState(RankRow(rank, "box", rank, "rank")) for rank in range(world_size)]
        view = SimpleNamespace(output=lambda _, text: self.said.append(text.decode()))
        self.watch = SingleTrainingWatch(self.plan, RunFolder("run", folder), view, clock=lambda: self.now)

    def rest(self, seconds):
        for _ in range(int(seconds)):
            self.now += 1
            self.watch.notice(self.ranks)

    def train(self, *ranks):
        for rank in ranks:
            fold(self.ranks[rank], TrainsAlone(time=self.now))

    def end(self):
        for state in self.ranks:
            state.exit = RankExit(rank=state.row.rank, time=self.now, status=0)
        return single_trainings(self.plan, self.ranks)


@pytest.fixture
def run(tmp_path):
    return lambda *program, **known: Run(tmp_path, *program, **known)


def test_ranks_that_train_alone_for_a_minute_are_named_once(run):
    run = run()
    run.train(0, 1)
    run.rest(59)
    assert [] == run.said
    run.rest(600)
    (said,) = run.said
    assert said.startswith(
        "warning[R074]: rank 0 and 1 of 2 trained a model each: these ranks have run a backward pass"
    )
    assert "ACCELERATE_USE_CPU" in said
    assert "`--independent`" in said


def test_ranks_that_join_within_the_minute_are_not_named(run):
    run = run()
    run.train(0, 1)
    run.rest(30)
    for state in run.ranks:
        fold(state, JoinedGroup(time=run.now))
    run.rest(600)
    assert [] == run.said
    assert run.end() is None


def test_a_run_of_ranks_that_trained_alone_fails_at_its_end(run):
    run = run()
    run.train(1)
    failure = run.end()
    assert ("R074", None, 1) == (failure.code, failure.rank, failure.kind.exit_status)
    assert failure.message.startswith("rank 1 of 2 trained a model by itself: this rank has run a backward pass")
    assert failure.comes_again


@pytest.mark.parametrize(
    ("program", "world_size"),
    [
        (CommandProgram("train", ("python", "train.py"), is_python=True, uses_mpi=False, is_independent=True), 2),
        (CommandProgram("train", ("python", "train.py"), is_python=True, uses_mpi=True), 2),
        (SCRIPT, 1),
    ],
    ids=["meant to be independent", "may exchange gradients by MPI", "one rank"],
)
def test_other_runs_are_left_alone(run, program, world_size):
    run = run(program, world_size=world_size)
    run.train(0)
    run.rest(600)
    assert [] == run.said
    assert run.end() is None
