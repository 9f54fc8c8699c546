"""A test cluster leaves nothing behind, also when the tests that own it are killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import ROOT, Cluster
from tests.cluster.keeper import PLACE, PREFIX, wait_until

pytestmark = pytest.mark.cluster

OWNER = """
import sys, time
from tests.cluster.hosts import Cluster
with Cluster(hosts=2) as cluster:
    cluster.popen("launcher", ["setsid", "sleep", "62"])
    cluster.popen("node0", ["setsid", "sleep", "62"])
    print(cluster.state, flush=True)
    time.sleep(60)
"""


def processes_of(state):
    """Every process whose network or files are those of the cluster, by what holds them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(state) in (process / "cmdline").read_text() or str(state) in (process / "mounts").read_text():
                found.append(process.name)
        except (OSError, UnicodeDecodeError):
            continue
    return found


def networks():
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add((process / "ns/net").readlink())
        except OSError:
            continue
    return found


def test_a_cluster_leaves_no_process_mount_or_file(make_cluster):
    cluster = make_cluster(hosts=2, shared_folder="/shared")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    sleepers = [cluster.popen(machine, ["setsid", "sleep", "63"], **pipes) for machine in ("launcher", "node0")]
    cluster.delay("node1", 1)
    cluster.silent_port("node1")
    own = {
        Path(f"/proc/{cluster._machines[name].keeper.pid}/ns/net").readlink() for name in ("launcher", *cluster.hosts)
    }
    assert own <= networks()
    assert processes_of(cluster.state)
    assert str(cluster.state) not in Path("/proc/self/mounts").read_text()

    cluster.close()
    for sleeper in sleepers:
        assert sleeper.returncode is not None
        assert [True] * 3 == [pipe.closed for pipe in (sleeper.stdin, sleeper.stdout, sleeper.stderr)]
    assert [] == processes_of(cluster.state)
    assert not own & networks()
    assert not cluster.state.exists()


def test_an_exception_ends_a_cluster():
    with pytest.raises(KeyError), Cluster(hosts=1) as cluster:
        cluster.kill("node7")
    assert [] == processes_of(cluster.state)
    assert not cluster.state.exists()


def test_a_cluster_whose_owner_was_killed_ends_and_the_next_one_clears_its_files(make_cluster):
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        state = Path(owner.stdout.readline().strip())
        owner.kill()
    assert state.name.startswith(PREFIX)
    assert state.parent == PLACE
    wait_until(lambda: processes_of(state) == [], what="the machines end with their owner")
    assert state.exists()
    make_cluster(hosts=1)
    assert not state.exists()
