"""What listens on the hosts of a run: Open MPI, on all interfaces whatever its settings say, and nothing of ttlaunch's own."""

import subprocess

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab  # noqa: F401 - a fixture
from tests.security.listeners import addresses_of

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

WAITS = """\
import time
from mpi4py import MPI
MPI.COMM_WORLD.allgather(bytes(100_000))
print("up", flush=True)
time.sleep(600)
"""
OF_MPI = ("prted", "mpi4py")
"""In the command lines of daemons, and of ranks."""


def test_no_agent_shim_or_script_of_ttlaunch_listens_on_a_host_of_a_run(
    make_cluster,
    ttlaunch_on,
    lab,  # noqa: F811 - a fixture
    tmp_path,
):
    cluster = make_cluster(hosts=2, networks=2)
    lab(cluster.hostfile())
    (tmp_path / "work.py").write_text(WAITS)
    printed = tmp_path / "printed"
    with printed.open("wb") as file:
        run = ttlaunch_on(cluster).start("run work.py --on lab --ranks 2", stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "up" in printed.read_text(), what="the ranks have met")
        processes = [(pid, words) for host in cluster.hosts for pid, words in cluster.pids(host).items()]
        ours = [pid for pid, words in processes if "sshd" not in words and not any(name in words for name in OF_MPI)]
        of_mpi = [pid for pid, words in processes if any(name in words for name in OF_MPI)]
        assert len(of_mpi) >= 4, processes
        assert any("shim.py" in words for _, words in processes), processes
        assert addresses_of(ours) == []
        assert addresses_of(of_mpi), "the test sees who listens there"
    finally:
        run.terminate()
        run.wait(60)
