"""Hosts that a run over hosts loses and goes on without; when they are back, ranks are started there again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from ttlaunch import contract

pytestmark = pytest.mark.cluster

GOING_ON = str(Path(__file__).parents[1] / "running/going_on.py")
LEASE_S = 3

# Rank 1 would wait for ever. Rank 0 ends when the rank that is added on the host which was away has come to it.
WORK = """\
import os, socket, time
rank, place = os.environ["TTLAUNCH_RANK"], (os.environ["MASTER_ADDR"], 47100)
print("up", rank, socket.gethostname(), flush=True)
if rank == "0":
    with socket.create_server(place) as server:
        server.accept()
elif rank == "1":
    time.sleep(600)
else:
    socket.create_connection(place).close()
"""


class Going:
    """A run of two ranks on two hosts, with a third one for later on the second host."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        (folder / "work.py").write_text(WORK)
        spec = {"target": "work.py", "on": "lab", "ranks": 3, "first": 2, "engine": "agents"}
        words = [sys.executable, GOING_ON, str(LEASE_S), json.dumps(spec)]
        pipe = subprocess.PIPE
        self.process = cluster.popen("launcher", words, cwd=folder, stdout=pipe, stderr=pipe, text=True)
        for rank in (0, 1):
            wait_until(lambda rank=rank: self.printed(rank), what=f"rank {rank} is up", timeout_s=60)

    def printed(self, rank):
        assert self.process.poll() is None, self.process.stderr.read()
        return "".join(path.read_text() for path in self.folder.glob(f"runs/*/{contract.stdout_file(rank)}"))

    def next_event(self):
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def ranks_on(self, host):
        return [pid for pid, words in self.cluster.pids(host).items() if "work.py" in words]

    def ends_well(self, number=signal.SIGKILL):
        """Wait for the end; `number` is the signal that ended rank 1 as far as anybody knows."""
        events = [self.next_event() for _ in range(3)]
        assert ["back", "ended", "killed"] == [event["event"] for event in events], events
        assert 0 == events[1]["status"]
        assert self.process.wait(60) == 0
        [folder] = [path for path in self.folder.glob("runs/[!.]*") if path.is_dir()]
        assert "up 2 node1\n" == (folder / contract.stdout_file(2)).read_text()
        exits = [json.loads((folder / contract.exit_file(rank)).read_text()) for rank in range(3)]
        assert [(0, None), (None, number), (0, None)] == [(one.get("status"), one.get("signal")) for one in exits]
        wait_until(lambda: not leftovers(self.cluster), what="hosts as before the run")


def has_open(pid, name):
    return any(path.readlink().name == name for path in Path(f"/proc/{pid}/fd").iterdir())


@pytest.fixture
def going(make_cluster, lab, tmp_path):  # noqa: F811 - the fixture
    cluster = make_cluster(hosts=2)
    lab("node0 slots=1\nnode1 slots=2\n")
    run = Going(cluster, tmp_path)
    yield run
    run.process.terminate()
    run.process.communicate(timeout=60)


def test_a_host_whose_cable_was_cut_starts_ranks_again_when_it_is_back(going):
    going.cluster.link("node1", up=False)
    lost = going.next_event()
    assert ("lost", "node1", [1]) == (lost["event"], lost["host"], lost["gone"])
    wait_until(lambda: not going.ranks_on("node1"), what="the rank there ends with its lease")
    assert going.ranks_on("node0")
    going.cluster.link("node1", up=True)
    going.ends_well()


def test_a_host_that_went_off_and_starts_anew_starts_ranks_again(going):
    going.cluster.kill("node1")
    lost = going.next_event()
    assert ("lost", "node1", [1]) == (lost["event"], lost["host"], lost["gone"])
    going.cluster.revive("node1")
    going.ends_well()


def test_what_a_host_did_before_it_stood_still_for_long_does_not_go_on_beside_what_starts_there(going):
    going.cluster.pause("node1")
    lost = going.next_event()
    assert ("lost", "node1", [1]) == (lost["event"], lost["host"], lost["gone"])
    before = going.ranks_on("node1")
    going.cluster.resume("node1")
    assert before
    going.ends_well()


def test_a_host_whose_agent_is_killed_is_lost_at_once_and_starts_ranks_again(going):
    [agent] = [pid for pid in going.cluster.pids("node1") if has_open(pid, "agent.claim")]
    os.kill(agent, signal.SIGKILL)
    lost = going.next_event()
    assert ("lost", [1], "its agent is gone: connection refused") == (lost["event"], lost["gone"], lost["reason"])
    assert lost["silent_s"] < LEASE_S
    going.ends_well(signal.SIGTERM)  # by the process that started it, as the record on the host says
