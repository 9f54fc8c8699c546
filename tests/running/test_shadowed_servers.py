"""Elastic runs whose servers have shadows: whoever is killed is replaced, and a state that is gone is named."""

import json
import os
import signal
import subprocess

import pytest

from ttlaunch.running.checkpoints.complete import newest_step

from .test_elastic_runs import COMMAND, MOST_S, SET, STEPS, kill_the_supervisor, running
from .test_elastic_shards import holders

pytestmark = pytest.mark.mpi
TIERS = "hierarchical_parallel"
OPTIMIZER, AGGREGATOR = 0, 1


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The parameters of one process."""
    command = [*COMMAND, TIERS, *SET, "-n", "1", "--format", "json"]
    here = tmp_path_factory.mktemp("one")
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True)
    return json.loads(done.stdout)["parameters_sha256"]


def kill(run, *numbers, after):
    run.until(lambda: run.step() >= after)
    pids = [run.pid(number) for number in numbers]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def resumed(here):
    command = [*COMMAND, TIERS, *SET, "--resume", "latest", "-n", "3", "--elastic", "3:3", "--warm", "--format", "json"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=False)
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("recipe", "arguments"), [(TIERS, []), ("sync_ps", ["--set", "sync_ps_config.num_servers=2"])])
def test_servers_that_are_killed_one_after_the_other_leave_the_parameters_of_one_process(
    here, expected, recipe, arguments
):
    with running(here, *arguments, recipe=recipe, ranks=4, elastic="3:4") as run:
        kill(run, OPTIMIZER, after=4)
        run.until(lambda: run.journal("epoch")[-1]["members"][0] != OPTIMIZER)
        kill(run, AGGREGATOR, after=10)
        report = run.report()
    assert ("done", expected, True) == (report["status"], report["parameters_sha256"], report["parameters_agree"])
    assert [OPTIMIZER, AGGREGATOR] == [entry["worker"] for entry in run.journal("lost")]
    assert STEPS == report["steps"]


def test_without_the_optimizer_and_its_shadow_the_run_ends_and_goes_on_from_its_checkpoint_with_fewer_workers(
    here, expected
):
    with running(here, "--set", "checkpoint_config.interval=4", recipe=TIERS, ranks=4, elastic="3:4") as run:
        run.until(lambda: newest_step(run.folder) is not None)
        compared = holders(run.folder, 4).values()  # by the launcher, which ends a run whose copies differ
        assert [{OPTIMIZER, AGGREGATOR}] * len(compared) == list(compared) != []
        kill(run, OPTIMIZER, AGGREGATOR, after=5)
        failure = run.report()["failure"]
    assert ("R075", True) == (failure["code"], "the worker that owned it and its shadow" in failure["cause"])
    assert expected == resumed(here)["parameters_sha256"]


def test_the_state_of_a_run_without_a_supervisor_is_saved_by_a_member_that_has_all_of_it(here, expected):
    with running(here, "--set", "checkpoint_config.interval=20", recipe=TIERS, ranks=4, elastic="3:4") as run:
        run.until(lambda: run.step() >= 5)
        kill_the_supervisor(run)
    report = resumed(here)
    assert expected == report["parameters_sha256"]
    assert report["began_from"]["step"] >= 5
    assert report["began_from"]["saved_by"].startswith(("worker-0000 ", "worker-0001 "))
