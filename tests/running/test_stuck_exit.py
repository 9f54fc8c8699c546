"""A program's rank whose process stays after an exception has ended it is the failure; nothing else that takes long is."""

import json
from types import SimpleNamespace

import pytest

from ttlaunch import contract
from ttlaunch.planning.launch_plan import CommandProgram, RankRow, RecipeProgram
from ttlaunch.running.hang.stuck_exit import StuckExitWatch
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch

RAISED = {"error": {"type": "ValueError", "message": "bucket 7", "time": 1.0}, "uncaught": True}
LEFT = {**RAISED, "left": 2.0}


class Run:
    """Two ranks, and a clock that moves when it is told to."""

    def __init__(self, folder, program):
        (folder / contract.RECORDS_DIR).mkdir()
        self.folder, self.now = RunFolder("run", folder), 100.0
        rows = tuple(RankRow(rank, "box", rank, "rank") for rank in (0, 1))
        plan = SimpleNamespace(ranks=rows, program=object.__new__(program), world_size=2)
        self.look = Watch(plan, self.folder)
        self.watch = StuckExitWatch(plan, self.folder, self.look, clock=lambda: self.now)

    def writes(self, rank, *lines):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.folder.file(contract.exceptions_file(rank)).write_text(text)

    def rest(self, seconds):
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            if failure := self.watch.check():
                return failure
        return None


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, CommandProgram)


def test_a_rank_whose_process_stays_after_its_exception_is_named_after_seconds(run):
    run.writes(1, RAISED, LEFT)
    assert run.rest(5) is None
    failure = run.rest(2)
    assert (failure.code, failure.rank, failure.cause) == ("R002", 1, "raised ValueError")
    assert failure.evidence[-1].startswith("its process was still there 5 s after all code of the program had run")
    assert "python -m mpi4py" in failure.next_step


@pytest.mark.parametrize(
    "lines",
    [
        [RAISED],
        [{**RAISED, "uncaught": False}],
        [{"error": None, "left": 2.0}],
        [LEFT, {"error": None}],
    ],
    ids=["its own code still runs", "it cleans up", "no exception", "it went on"],
)
def test_a_rank_whose_code_still_runs_or_that_has_not_failed_may_take_its_time(run, lines):
    run.writes(1, *lines)
    assert run.rest(60) is None


def test_ranks_that_lost_their_connections_are_not_named_while_the_rank_that_closed_them_is_still_ending(run):
    """On a busy machine, libraries such as torch take longer to end than ranks usually stay."""
    lost = {"type": "BrokenPipeError", "message": "", "time": 1.0, "causes": [{"type": "BrokenPipeError"}]}
    run.writes(0, {"error": None, "left": 0.9})
    run.writes(1, {"error": lost, "uncaught": True, "left": 2.0})
    assert run.rest(14) is None
    failure = run.rest(3)
    assert (failure.code, failure.rank) == ("R005", 0)
    assert failure.cause == "left before the other ranks; its process is still there"


def test_a_rank_that_has_ended_is_left_to_the_engine(run):
    run.writes(1, RAISED, LEFT)
    ending = {"rank": 1, "pid": 7, "started": 1.0, "time": 2.0, "status": 1, "signal": None}
    run.folder.file(contract.exit_file(1)).write_text(json.dumps(ending))
    run.look.read_all()
    assert run.rest(60) is None


def test_ranks_of_recipes_are_not_looked_at(tmp_path):
    run = Run(tmp_path, RecipeProgram)
    run.writes(1, RAISED, LEFT)
    assert run.rest(60) is None
