"""Recipes whose ranks are forked with `--warm`: the same parameters as with other ranks, and the same reports of what breaks."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running.conftest import StartedRun
from ttlaunch import contract
from ttlaunch.agent.run_processes import run_processes

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.mpi

FEW = ["--set", "training_config.steps=24"]
GRPC = ["--set", "multihost_config.socket_type=grpc"]
IMPORTING = contract.START_STAGES[2]
LOOK = """\
import json, sys
from ttlaunch.runtime.import_ahead import import_ahead
import_ahead(sys.argv[1])
with open("/proc/self/status") as file:
    [threads] = [int(line.split()[1]) for line in file if line.startswith("Threads:")]
json.dump([sorted(sys.modules), threads], sys.stdout)
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The parameters of one process, which has no messages and imports torch itself."""
    run = StartedRun(tmp_path_factory.mktemp("one"), ["data_parallel", *FEW, *GRPC, "-n", "1"])
    try:
        assert 0 == run.ends(within_s=120), run.stderr
        return run.report["parameters_sha256"]
    finally:
        run.close()


def assert_forked(run, rank):
    kinds = {(one["kind"], one.get("stage")) for one in run.records(rank)}
    assert (contract.KIND_STARTING, IMPORTING) not in kinds, f"rank {rank} has imported torch itself"
    assert (contract.KIND_STARTING, contract.START_STAGES[-1]) in kinds


def test_forked_ranks_of_a_recipe_have_the_parameters_of_one_process(here, start_run, expected):
    run = start_run("data_parallel", *FEW, *GRPC, "-n", "3", "--warm")
    assert 0 == run.ends(within_s=120), run.stderr
    for rank in range(3):
        assert_forked(run, rank)
    assert (expected, True) == (run.report["parameters_sha256"], run.report["parameters_agree"])
    assert "starts by itself" not in run.stdout + run.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "ttlaunch", "report", "latest"], cwd=here, capture_output=True, text=True, check=True
    )
    assert "start of the ranks by the engine, which imports torch for them" in shown.stdout


def test_a_worker_that_replaces_another_one_is_forked_too(start_run, expected, until):
    run = start_run("data_parallel", *FEW, "-n", "2", "--elastic", "1:2", "--warm")

    def pid(rank):
        return next((one["pid"] for one in run.records(rank) if one["kind"] == contract.KIND_STARTED), None)

    def has_made(step):
        return any(one["kind"] == contract.KIND_STEP and one["step"] >= step for one in run.records(0))

    until(lambda: run.run_folder and (run.run_folder / contract.progress_file(0)).is_file(), within_s=60, what="a rank")
    until(lambda: has_made(1), within_s=120, what="the first step")
    os.kill(pid(1), signal.SIGKILL)
    assert 0 == run.ends(within_s=120), run.stderr
    for worker in (0, 1, 3):  # the numbers of replacements begin after those of all places
        assert_forked(run, worker)
    assert (expected, True) == (run.report["parameters_sha256"], run.report["parameters_agree"])


@pytest.mark.parametrize(("fault", "code"), [("kill", "R004"), ("stop", "R013")])
def test_a_fault_in_a_forked_rank_of_a_recipe_is_named_and_leaves_nothing(here, fault, code):
    options = ["--warm", "-n", "2", *GRPC, "--set", "training_config.steps=100000", "--hang-timeout", "3"]
    words = ["chaos", "data_parallel", "--plan", f"{fault} rank=1 at step=2", "--format", "json", *options]
    command = [sys.executable, "-m", "ttlaunch", *words]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=200, check=False)
    found = json.loads(done.stdout)
    failure = found["report"]["failure"]
    named = (done.returncode, [one["outcome"] for one in found["faults"]], failure["code"], failure["rank"])
    assert (0, ["named"], code, 1) == named
    assert [] == run_processes(found["run_id"])
    assert [([], [])] == [(one["processes"], one["folders"]) for one in found["left"]]


def test_a_forked_rank_of_a_recipe_writes_its_stacks_on_order(start_run, until):
    run = start_run("data_parallel", *GRPC, "--set", "training_config.steps=100000", "-n", "2", "--warm")
    until(lambda: run.run_folder and (run.run_folder / contract.progress_file(1)).is_file(), within_s=60, what="a rank")
    ready = until(
        lambda: [one for one in run.records(1) if one["kind"] == contract.KIND_READY], within_s=120, what="rank 1"
    )
    assert ready
    [pid] = [one["pid"] for one in run.records(1) if one["kind"] == contract.KIND_STARTED]
    os.kill(pid, signal.SIGUSR2)
    stacks = run.run_folder / contract.stacks_file(1)
    until(lambda: "entry.py" in stacks.read_text(), within_s=60, what="rank 1 has written its stacks")
    assert "" == (run.run_folder / contract.stacks_file(0)).read_text()


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in ROOT.glob("recipes/*/trainer.py")))
def test_what_ranks_of_a_recipe_share_has_one_thread_and_no_transport(here, recipe):
    (here / "plan.json").write_text(json.dumps(PLAN | {"recipe": {"folder": str(ROOT / "recipes" / recipe)}}))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, "plan.json"], capture_output=True, text=True, check=True, env=environment
    )
    modules, threads = json.loads(done.stdout)
    assert 1 == threads
    assert set() == {"grpc", "mpi4py"} & {*modules}
    names = re.findall(r"\w+", re.findall(r"from ttlaunch.train import \(?([^)\n]*|[^)]*)\)?", _trainer(recipe))[0])
    train = "import sys, ttlaunch.train as train; [getattr(train, name) for name in sys.argv[1:]]; print(*sys.modules)"
    asked = subprocess.run([sys.executable, "-c", train, *names], capture_output=True, text=True, check=True)
    assert set() == {*asked.stdout.split()} - {*modules}


def _trainer(recipe):
    return (ROOT / "recipes" / recipe / "trainer.py").read_text()


PLAN = {
    "format": contract.PLAN_FORMAT,
    "ranks": [],
    "layout": "",
    "config": {"multihost_config": {"socket_type": "grpc"}},
}
