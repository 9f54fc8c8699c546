"""Runs over real hosts whose ranks MPICH's Hydra starts: the same bits, the chosen network, the right rank, nothing left."""

import ipaddress
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cluster.command import CommandLine
from tests.cluster.hosts import CODE, LAUNCHER
from tests.cluster.keeper import wait_until
from tests.cluster.test_listening import beyond
from tests.cluster.test_run import STEPS, digest, lab, leftovers  # noqa: F401 - `lab` is a fixture
from tests.security.listeners import addresses_of

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

MEETS = """\
import os, pathlib, time
from mpi4py import MPI
world = MPI.COMM_WORLD
print("sum", world.allreduce(world.rank + 1), world.rank, MPI.Get_library_version().split()[0], flush=True)
while not pathlib.Path("/root/go").exists():
    time.sleep(0.05)
world.Barrier()
"""


@pytest.fixture
def hosts(make_cluster, lab, mpich_python, tmp_path):  # noqa: F811 - a fixture
    """`hosts(count, python=…)`: that many hosts with two networks, and the command line of an environment with MPICH."""

    def make(count, *, python=None, **options):
        environment = mpich_python.parents[1]
        cluster = make_cluster(hosts=count, networks=2, share=(*CODE, environment), **options)
        lab(cluster.hostfile(), python=str(python or mpich_python))
        return cluster, CommandLine(cluster, cwd=tmp_path, python=mpich_python)

    return make


def test_a_recipe_has_the_bits_of_open_mpi_and_leaves_nothing(hosts, ttlaunch_on, tmp_path):
    cluster, run = hosts(2)
    spread = run(f"run data_parallel --on lab --ranks 2 {STEPS} --format json", timeout_s=120)
    alone = ttlaunch_on(cluster)(f"run data_parallel --ranks 2 {STEPS} --format json", timeout_s=120)
    assert spread.status == 0, spread.stdout
    assert digest(alone) == digest(spread)
    names = sorted(json.loads(path.read_text())["engine"]["name"] for path in tmp_path.glob("runs/*/plan.json"))
    assert ["MPICH", "Open"] == [name.split()[0] for name in names]
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


def test_ranks_meet_and_listen_on_the_chosen_network_alone(hosts, tmp_path):
    cluster, run = hosts(2)
    (tmp_path / "work.py").write_text(MEETS)
    printed = tmp_path / "printed"
    with printed.open("wb") as file:
        started = run.start("run work.py --on lab --ranks 2", stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: printed.read_text().count("sum 3") == 2, what="all ranks use MPI")
        assert printed.read_text().count(" MPICH") == 2
        machines = (LAUNCHER, *cluster.hosts)
        wait_until(
            lambda: not any(beyond(cluster, name) for name in machines), what="no socket is open to other networks"
        )
        for host in cluster.hosts:
            processes = {pid: words for pid, words in cluster.pids(host).items() if "sshd" not in words}
            assert any("hydra_pmi_proxy" in words for words in processes.values()), processes
            found = set(addresses_of(processes))
            assert found <= {ipaddress.ip_address(cluster.ip(host))}, (found, processes)
            cluster.path(host, "/root/go").touch()
        assert started.wait(60) == 0, printed.read_text()
    finally:
        started.terminate()
        started.wait(60)


def test_a_killed_rank_is_named_first_and_nothing_is_left(hosts, tmp_path):
    cluster, run = hosts(2)
    (tmp_path / "work.py").write_text(MEETS)
    printed = tmp_path / "printed"
    with printed.open("wb") as file:
        started = run.start("run work.py --on lab --ranks 2", stdout=file, stderr=subprocess.STDOUT)
    wait_until(lambda: printed.read_text().count("sum 3") == 2, what="all ranks use MPI")
    (rank,) = [pid for pid, words in cluster.pids("node1").items() if "work.py" in words and "shim" not in words]
    os.kill(rank, signal.SIGKILL)
    assert started.wait(60) == 1, printed.read_text()
    (report,) = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/report.json")]
    failure = report["failure"]
    assert ("R004", 1, "node1") == (failure["code"], failure["rank"], failure["host"])
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


def test_hosts_whose_mpi4py_loads_another_mpi_are_refused_before_anything_starts(hosts):
    """The interpreter of the hosts has Open MPI, and mpiexec of this machine is MPICH's."""
    _, run = hosts(2, python=sys.executable)
    checked = run("doctor --on lab")
    assert checked.status == 4
    assert "error[H001]: 2 of 2 hosts have no MPICH" in checked.stderr
    assert "error[H004]: 2 of 2 hosts pair mpi4py with another MPI" in checked.stderr
    refused = run("run data_parallel --on lab --ranks 2")
    assert refused.status == 4
    assert "error[H004]: 2 of 2 hosts pair mpi4py with another MPI" in refused.stderr
