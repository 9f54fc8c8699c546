"""A run over hosts that hangs: the rank is named with its host and its line, in time, and its stacks and boxes come home."""

import json
import os
import re
import signal
import time

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from tests.recipes.peers import PEERS

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

TIMEOUT_S = 4
BOXES_LATE_S = 5
WITHIN_S = TIMEOUT_S + 5 + BOXES_LATE_S

TRAINER = """\
import time
import torch
from ttlaunch.train import barrier


def peer(cfg, ctx):
    one = torch.zeros(2)
    for step in range(1, 100000):
        ctx.step = step
        ctx.traffic.begin_step(step)
        barrier(ctx, among=ctx.ranks("peer"))
        if step == 3:
            print("up", flush=True)
            hang(ctx, one)
        time.sleep(0.02)
        ctx.report(step)


def hang(ctx, one):
"""
CIRCLE = "    if ctx.rank:\n        ctx.recv(one, source=3 - ctx.rank)\n"
GOES_ON = "    pass\n"


@pytest.fixture
def cluster(make_cluster):
    return make_cluster(hosts=3)


@pytest.fixture
def hanging(cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811 - the fixture
    """`hanging(body)`: a run of three ranks, one on each host, whose third step does something else; it is there by now."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/recipe.py").write_text(PEERS)
    (tmp_path / "mine/train.yaml").write_text("{}\n")
    lab(cluster.hostfile())

    def start(body):
        (tmp_path / "mine/trainer.py").write_text(TRAINER + body)
        return whose_ranks_are_up(ttlaunch_on(cluster).start(f"run mine --on lab --ranks 3 --hang-timeout {TIMEOUT_S}"))

    return start


def whose_ranks_are_up(process):
    """A launcher, once it has said so of its three ranks."""
    lines = []
    while sum(line.rstrip().endswith("| up") for line in lines) < 3 and "×3" not in "".join(lines):
        lines.append(process.stdout.readline())
        assert lines[-1], (lines, process.stderr.read())
    return process


def told(process, tmp_path, *, began):
    """The failure, how the run put it, and how long after the hang it was found."""
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 6, stderr
    [folder] = [path.parent for path in tmp_path.glob("runs/*/report.json")]
    failure = json.loads((folder / "report.json").read_text())["failure"]
    print(f"\nfound after {failure['time'] - began:.1f} s\n{stderr}")
    return failure, re.sub(r"(for|within) \d+ s", r"\1 SECONDS s", stderr), failure["time"] - began, folder


def test_two_hosts_that_wait_for_each_other_are_named_and_all_stacks_come_home(cluster, hanging, tmp_path):
    process = hanging(CIRCLE)
    failure, said, seconds, folder = told(process, tmp_path, began=time.time())
    rank = failure["rank"]
    other = 3 - rank
    assert rank in {1, 2}
    assert (
        f"error[R015]: rank {rank} (peer, node{rank}) waits in a circle, {rank} → {other} → {rank}: "
        "all of them receive and none sends in step 3\n"
    ) in said
    assert failure["place"].endswith("trainer.py:21")
    assert seconds < WITHIN_S
    for number in range(3):
        assert "trainer.py" in (folder / f"stacks/rank-{number}.txt").read_text()
        assert (folder / f"blackbox/rank-{number}.box").exists()
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


def test_a_rank_that_was_stopped_on_another_host_is_named(cluster, hanging, tmp_path):
    process = hanging(GOES_ON)
    [rank] = [pid for pid, line in cluster.pids("node2").items() if "ttlaunch.runtime" in line and "shim" not in line]
    began = time.time()
    os.kill(rank, signal.SIGSTOP)
    failure, said, seconds, folder = told(process, tmp_path, began=began)
    assert (
        "error[R013]: rank 2 (peer, node2) was stopped by a signal, and nobody resumed it within SECONDS s in step "
    ) in said
    assert failure["class"] == "hung"
    assert seconds < WITHIN_S
    assert "trainer.py" in (folder / "stacks/rank-0.txt").read_text()
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


RING = """\
import sys, time
from mpi4py import MPI

comm = MPI.COMM_WORLD
print("up", flush=True)
for step in range(int(sys.argv[1])):
    time.sleep(0.01)
    comm.allreduce(step)
"""


@pytest.fixture
def ring(cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811 - the fixture
    """`ring(steps)`: a program that is no recipe, of three ranks, one on each host, which take steps by now."""
    (tmp_path / "ring.py").write_text(RING)
    lab(cluster.hostfile())

    def start(steps):
        words = f"run ring.py --on lab --ranks 3 --hang-timeout {TIMEOUT_S} -- {steps}"
        return whose_ranks_are_up(ttlaunch_on(cluster).start(words))

    return start


def failure_of(process, tmp_path):
    _, stderr = process.communicate(timeout=60)
    [report] = tmp_path.glob("runs/*/report.json")
    return json.loads(report.read_text())["failure"], stderr


def pid_of(cluster, host, words):
    """A process of the run on a host: the only one, or the youngest, with these words in its command line."""
    found = [pid for pid, line in cluster.pids(host).items() if words in line and "sh -c" not in line]
    assert found, cluster.pids(host)
    return max(found)


def test_a_network_that_carries_nothing_in_one_direction_is_named_with_both_hosts(cluster, ring, tmp_path):
    process = ring(10**6)
    cluster.cut_one_way("node0", "node2")
    failure, stderr = failure_of(process, tmp_path)
    assert ("R065", None, "hung") == (failure["code"], failure["rank"], failure["class"]), stderr
    assert failure["host"] in {"node0", "node2"}
    assert "between node0 and node2 " in failure["cause"] or "between node2 and node0 " in failure["cause"]


def test_a_stopped_daemon_of_mpirun_is_named_with_its_host(cluster, ring, tmp_path):
    process = ring(300)
    os.kill(pid_of(cluster, "node1", "prted"), signal.SIGSTOP)
    failure, stderr = failure_of(process, tmp_path)
    assert ("R064", None, "node1") == (failure["code"], failure["rank"], failure["host"]), stderr
    assert failure["evidence"] == ["it started rank 1"]
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


def test_a_stopped_shim_on_a_host_is_named_with_its_rank(cluster, ring, tmp_path):
    process = ring(300)
    os.kill(pid_of(cluster, "node2", "shim.py"), signal.SIGSTOP)
    failure, stderr = failure_of(process, tmp_path)
    assert ("R013", 2, "node2") == (failure["code"], failure["rank"], failure["host"]), stderr
    assert failure["cause"].startswith("cannot go on: its shim (process ")
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")
