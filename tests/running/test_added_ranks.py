"""Ranks that are added to a run: started, supervised, recorded and ended as the first ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.agent.run_processes import run_processes
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.run_spec import RunSpec

pytestmark = pytest.mark.mpi

GROWING = str(Path(__file__).with_name("growing.py"))

# The first ranks wait for a file that the added one writes, so it has certainly run beside them.
WORK = """\
import os, signal, sys, time
rank, fault = os.environ["TTLAUNCH_RANK"], sys.argv[1]
print("up", rank, os.environ["TTLAUNCH_WORLD_SIZE"], "torch" in sys.modules, os.getppid(), flush=True)
if rank == "0" and fault != "never":
    print("add 2", flush=True)
if rank == "2":
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raised":
        raise ValueError("bucket 7")
    open("added", "w").close()
while fault != "never" and not os.path.exists("added"):
    time.sleep(0.02)
"""


@pytest.fixture
def grow(here):
    """`grow(fault, **fields)`: the report of three ranks, of which the last is added; and the folder of the run."""

    def run(fault, **fields):
        (here / "work.py").write_text(WORK)
        spec = {"target": "work.py", "ranks": 3, "first": 2, "arguments": [fault], **fields}
        words = [sys.executable, GROWING, json.dumps(spec)]
        done = subprocess.run(words, cwd=here, capture_output=True, text=True, timeout=200, check=False)
        assert done.stdout, done.stderr
        report = json.loads(done.stdout.splitlines()[-1])
        [folder] = [path for path in here.glob("runs/[!.]*") if path.is_dir()]
        assert ([], False) == (run_processes(folder.name), report["scratch_is_left"])
        return report, folder

    return run


def printed(folder, rank):
    return (folder / contract.stdout_file(rank)).read_text().splitlines()


@pytest.mark.parametrize("warm", [False, True])
def test_an_added_rank_runs_beside_the_first_ones_and_is_recorded_as_they_are(grow, warm):
    report, folder = grow("none", warm=warm)
    assert "done" == report["status"], report
    ups = [printed(folder, rank)[0].split() for rank in (0, 1, 2)]
    assert [["up", str(rank), "3", str(warm)] for rank in (0, 1, 2)] == [line[:4] for line in ups]
    assert ["done"] * 3 == [row["state"] for row in report["ranks"]]
    exits = [json.loads((folder / contract.exit_file(rank)).read_text()) for rank in (0, 1, 2)]
    assert [0, 0, 0] == [one["status"] for one in exits]


@pytest.mark.parametrize(("fault", "code"), [("killed", "R004"), ("raised", "R002")])
@pytest.mark.parametrize("warm", [False, True])
def test_an_added_rank_that_fails_is_named_and_ends_the_run(grow, fault, code, warm):
    report, _ = grow(fault, warm=warm)
    failure = report["failure"]
    assert ("failed", code, 2) == (report["status"], failure["code"], failure["rank"]), report
    assert ["stopped", "stopped", "failed"] == [row["state"] for row in report["ranks"]]


# Each rank waits for an order that the other one has sent.
ORDERED = """\
import os, socket
rank = int(os.environ["TTLAUNCH_RANK"])
orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
orders.bind(os.path.join(os.environ["TTLAUNCH_SCRATCH"], f"rank-{rank}.orders"))
print("tell", 1 - rank, "begin", "x" * rank * 100_000, flush=True)
print("got", len(orders.recv(1 << 20)), flush=True)
"""


def test_orders_reach_workers_as_datagrams_in_the_private_folder_of_the_run(here):
    (here / "work.py").write_text(ORDERED)
    words = [sys.executable, GROWING, json.dumps({"target": "work.py", "ranks": 2})]
    done = subprocess.run(words, cwd=here, capture_output=True, text=True, timeout=200, check=False)
    assert "done" == json.loads(done.stdout.splitlines()[-1])["status"], done.stderr
    [folder] = [path for path in here.glob("runs/[!.]*") if path.is_dir()]
    assert ["got 100006", "got 6"] == [printed(folder, rank)[-1] for rank in (0, 1)]


def test_a_run_to_which_no_rank_was_added_ends_with_its_first_ranks(grow):
    report, folder = grow("never")
    assert ("done", ["done", "done", "absent"]) == (report["status"], [row["state"] for row in report["ranks"]])
    assert not (folder / contract.stdout_file(2)).exists()


def test_ranks_cannot_be_for_later_with_an_engine_to_which_none_can_be_added(here):
    (here / "work.py").write_text(WORK)
    with pytest.raises(ValueError, match="no rank can be added with Open MPI"):
        prepare(RunSpec("work.py", ranks=2, first=1, engine="openmpi"), Unattended())
