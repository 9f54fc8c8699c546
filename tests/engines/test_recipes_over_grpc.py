"""Recipes over gRPC, which engine `agents` starts without MPI: the same bits, the same bytes, the same culprits."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.forked import FORKED
from tests.running.conftest import StartedRun, wait_until
from ttlaunch import contract

pytestmark = pytest.mark.mpi

SMALL = [
    "--set",
    "training_config.steps=6",
    "--set",
    "training_config.validation_interval=6",
    "--set",
    "transformer_config.num_blocks=1",
    "--set",
    "training_config.batch_size=6",
    "--set",
    "training_config.micro_batch_size=1",
]
OVER_GRPC = [*FORKED]


@pytest.fixture
def start(tmp_path):
    """`start(recipe, …)` starts a recipe in a folder of its own."""
    runs = []

    def make(*arguments):
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(StartedRun(folder, [*arguments, "--format", "json"]))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.mark.parametrize(
    "line",
    [
        "data_parallel --ranks 3",
        "hierarchical_parallel",
        "zero --ranks 3",
        pytest.param("sync_ps", marks=pytest.mark.slow),
        pytest.param("local_sgd", marks=pytest.mark.slow),
        pytest.param("fully_sharded", marks=pytest.mark.slow),
        pytest.param("tensor_parallel", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_has_the_bits_and_the_bytes_that_it_has_over_mpi(start, line):
    over_mpi = start(*line.split(), *SMALL)
    assert 0 == over_mpi.ends(within_s=120), over_mpi.stderr
    over_grpc = start(*line.split(), *SMALL, *OVER_GRPC)
    assert 0 == over_grpc.ends(within_s=120), over_grpc.stderr
    expected, found = json.loads(over_mpi.stdout), json.loads(over_grpc.stdout)
    assert expected["parameters_sha256"] == found["parameters_sha256"]
    assert over_mpi.report["traffic"] == over_grpc.report["traffic"]
    engines = [json.loads((run.run_folder / contract.PLAN_FILE).read_text())["engine"] for run in (over_mpi, over_grpc)]
    assert [True, False] == [engine["names"].get("has_mpi", True) for engine in engines]


def test_a_killed_rank_is_named_and_not_one_that_lost_its_peer(start):
    steps = ["--set", "training_config.steps=100000"]
    run = start("data_parallel", "--ranks", "3", *SMALL, *steps, *OVER_GRPC)
    wait_until(lambda: trains(run), within_s=120, what="a step is done")
    (pid,) = [record["pid"] for record in run.records(1) if record["kind"] == "started"]
    os.kill(pid, signal.SIGKILL)
    assert 1 == run.ends(within_s=60)
    assert (1, "killed") == (run.report["failure"]["rank"], run.report["failure"]["class"])


def test_ranks_listen_on_no_port(start):
    steps = ["--set", "training_config.steps=100000"]
    run = start("data_parallel", "--ranks", "2", *SMALL, *steps, *OVER_GRPC)
    wait_until(lambda: trains(run), within_s=120, what="a step is done")
    pids = [record["pid"] for rank in (0, 1) for record in run.records(rank) if record["kind"] == "started"]
    assert [] == [line for pid in pids for line in listening(pid)]


def trains(run):
    path = run.run_folder and run.run_folder / contract.progress_file(0)
    return path and path.exists() and '"kind": "step"' in path.read_text()


def listening(pid):
    """The lines of /proc for sockets of a process that listen for TCP connections."""
    links = [path for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    inodes = {str(path.readlink()) for path in links}
    lines = []
    for name in ("tcp", "tcp6"):
        lines += Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]
    return [line for line in lines if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes]
