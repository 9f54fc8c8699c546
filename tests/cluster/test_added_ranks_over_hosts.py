"""Ranks that are added to a run over hosts: the agents that are there already start them, supervise them and end them."""

import json
import subprocess
import sys

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from tests.running.test_added_ranks import GROWING, ORDERED
from ttlaunch import contract

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

# Rank 1 is at first the only one on its host and ends at once. Rank 0 ends when it has met those that are added, which it asks for.
WORK = """\
import os, signal, socket, sys, time
rank, fault, place = os.environ["TTLAUNCH_RANK"], sys.argv[1], (os.environ["MASTER_ADDR"], 47100)
print("up", rank, socket.gethostname(), "torch" in sys.modules, flush=True)
if rank == "0":
    server = socket.create_server(place)
    print("add 2\\nadd 3", flush=True)
    met = [server.accept(), server.accept()]
    time.sleep(600 if fault else 0)
elif rank != "1":
    socket.create_connection(place).close()
if rank == "3" and fault:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def grow(make_cluster, lab, tmp_path):  # noqa: F811 - the fixture
    """`grow(fault, **fields)`: the report of four ranks on two hosts, of which the last two are added; and the run's folder."""

    def run(fault, script=WORK, **fields):
        cluster = make_cluster(hosts=2)
        lab("node0 slots=1\nnode1 slots=3\n")
        (tmp_path / "work.py").write_text(script)
        spec = {"target": "work.py", "on": "lab", "ranks": 4, "first": 2, "arguments": [fault], **fields}
        spec["env"] = ["OMP_NUM_THREADS=1"]  # else the import of torch starts threads where a rank is alone
        words = [sys.executable, GROWING, json.dumps(spec)]
        process = cluster.popen(
            "launcher", words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        stdout, stderr = process.communicate(timeout=200)
        assert stdout, stderr
        [folder] = [path for path in tmp_path.glob("runs/[!.]*") if path.is_dir()]
        wait_until(lambda: not leftovers(cluster), what="hosts as before the run")
        return json.loads(stdout.splitlines()[-1]), folder

    return run


@pytest.mark.parametrize("warm", [False, True])
def test_ranks_are_added_on_a_host_whose_first_rank_has_ended(grow, warm):
    report, folder = grow("", warm=warm)
    assert ("done", ["done"] * 4) == (report["status"], [row["state"] for row in report["ranks"]]), report
    printed = [(folder / contract.stdout_file(rank)).read_text().splitlines()[0] for rank in range(4)]
    hosts = ["node0", "node1", "node1", "node1"]
    assert [f"up {rank} {host} {warm}" for rank, host in enumerate(hosts)] == printed


def test_orders_reach_the_workers_of_other_hosts(grow):
    report, folder = grow("", ORDERED, ranks=2, first=None)
    assert ("done", ["node0", "node1"]) == (report["status"], [row["host"] for row in report["ranks"]]), report
    printed = [(folder / contract.stdout_file(rank)).read_text().splitlines()[-1] for rank in range(2)]
    assert ["got 100006", "got 6"] == printed


def test_an_added_rank_that_is_killed_is_named_with_its_host(grow):
    report, _ = grow("killed")
    failure = report["failure"]
    assert ("failed", "R004", 3, "node1") == (report["status"], failure["code"], failure["rank"], failure["host"]), (
        report
    )
