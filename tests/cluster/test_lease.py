"""A run over hosts whose connections break, and the agents that keep it or end it by themselves."""

import json
import os
import signal
import time

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

STEPS = 200
SUMS = f"""\
import time
from mpi4py import MPI
comm, total = MPI.COMM_WORLD, 0
for step in range({STEPS}):
    total = comm.allreduce(total % 1000003 + comm.rank + step)
    print(step, total, "x" * (step % 50), flush=True)
    time.sleep(0.05)
"""
RANKS = 3


def sums():
    """What every rank of such a run prints."""
    total, lines = 0, []
    for step in range(STEPS):
        total = sum(total % 1000003 + rank + step for rank in range(RANKS))
        lines.append(f"{step} {total} {'x' * (step % 50)}\n")
    return "".join(lines)


class Summing:
    """A run in which three ranks on three hosts add numbers and print them."""

    def __init__(self, cluster, ttlaunch_on, folder, options=""):
        (folder / "sums.py").write_text(SUMS)
        self.folder = folder
        self.process = ttlaunch_on(cluster).start(f"run {options} --on lab --ranks {RANKS} -- python3 sums.py")
        self.reached(5)

    def reached(self, step):
        """Read on until a rank has printed this step."""
        while f"| {step} " not in (line := self.process.stdout.readline()):
            assert line, self.process.stderr.read()

    def events(self, kind):
        [path] = self.folder.glob("runs/*/events.jsonl")
        return [event for event in map(json.loads, path.read_text().splitlines()) if event["event"] == kind]

    def is_complete(self):
        stdout, stderr = self.process.communicate(timeout=40)
        assert (self.process.returncode, stderr) == (0, ""), stdout[-500:]
        logs = [path.read_text() for path in sorted(self.folder.glob("runs/*/logs/rank-*.stdout"))]
        return logs == [sums()] * RANKS


@pytest.fixture
def cluster(make_cluster):
    return make_cluster(hosts=RANKS)


@pytest.fixture
def summing(cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811 - the fixture
    lab(cluster.hostfile())
    return Summing(cluster, ttlaunch_on, tmp_path)


def sessions(cluster, host):
    """The processes of sshd there that serve a connection."""
    return [pid for pid, line in cluster.pids(host).items() if line.startswith("sshd: ") and "[listener]" not in line]


def test_connections_that_are_killed_again_and_again_do_not_hurt(cluster, summing):
    for number in (1, 2, 3):
        for host in ("node0", "node2"):
            for pid in sessions(cluster, host):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(summing.events("host_joined_again")) == 2 * number, what="both are back")  # noqa: B023
    assert summing.is_complete()
    assert not leftovers(cluster)


def test_a_cable_that_is_cut_for_five_seconds_does_not_hurt(cluster, summing):
    cluster.link("node1", up=False)
    end = time.monotonic() + 5.0
    wait_until(lambda: time.monotonic() > end, what="five seconds")
    cluster.link("node1", up=True)
    assert summing.is_complete()
    [event] = summing.events("host_joined_again")
    assert event["host"] == "node1"
    assert summing.events("host_lost") == []
    assert not leftovers(cluster)


def test_a_host_on_which_everything_is_stopped_is_lost_and_ends_its_ranks_when_it_goes_on(
    cluster,
    ttlaunch_on,
    lab,  # noqa: F811 - the fixture
    tmp_path,
):
    lab(cluster.hostfile())
    run = Summing(cluster, ttlaunch_on, tmp_path, "--lease 4")
    cluster.pause("node1")
    _, stderr = run.process.communicate(timeout=40)
    told, named, *_ = stderr.splitlines()
    assert told.startswith("host node1 has not answered for 2 s; unless it comes back within ")
    assert (run.process.returncode, named.partition(":")[0]) == (7, "error[R012]")
    assert not leftovers(cluster, hosts=["node0", "node2"])
    cluster.resume("node1")
    wait_until(lambda: not leftovers(cluster), what="nothing is left on node1 either")
