"""Runs whose ranks MPICH's Hydra starts: the rank that is killed is named, whichever it is, and nothing is left of the run."""

import os
import signal
from pathlib import Path

import pytest

from tests.running.conftest import start_run, wait_until  # noqa: F401 - a fixture
from ttlaunch import contract

pytestmark = pytest.mark.mpi
SHARED = Path("/dev/shm")  # noqa: S108 - where MPICH puts such files


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_killed_rank_of_a_recipe_is_named_and_nothing_is_left(start_run, mpich_python, victim):  # noqa: F811 - a fixture
    run = start_run("data_parallel", "-n", "3", "--set", "training_config.steps=100000", python=mpich_python)

    def has_done_a_step():
        path = run.run_folder and run.run_folder / contract.progress_file(victim)
        return path and path.is_file() and '"kind": "step"' in path.read_text()

    wait_until(has_done_a_step, within_s=60, what="a step is done")
    noted = wait_until(
        lambda: [SHARED / path.name for scratch in run.scratch_folders() for path in Path(scratch).glob("segments/*")],
        within_s=10,
        what="the files outside the run's folder are noted",
    )
    assert all(path.exists() for path in noted)
    started = next(record for record in run.records(victim) if "pid" in record and "shim_pid" in record)
    os.kill(started["pid"], signal.SIGKILL)
    assert run.ends(within_s=30) == 1
    failure = run.report["failure"]
    assert ("R004", victim, "was killed by SIGKILL") == (failure["code"], failure["rank"], failure["cause"])
    assert sorted(one["rank"] for one in failure["cascade"]) == sorted({0, 1, 2} - {victim})
    assert ([], []) == (run.processes(), run.scratch_folders())
    assert not any(path.exists() for path in noted)
