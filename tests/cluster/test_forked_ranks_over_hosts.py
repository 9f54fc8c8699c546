"""`--warm` over hosts: one process on each host imports torch and forks the ranks there, over SSH and in a job of Slurm."""

import json
import re

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from ttlaunch import contract

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

FORKED = """\
import os, signal, socket, sys
loaded = "torch" in sys.modules
def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
starter = parent_of(os.getppid())
with open(f"/proc/{starter}/maps") as file:
    imports = "libtorch" in file.read()
rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("forked", rank, socket.gethostname(), starter, loaded, imports, count, flush=True)
if sys.argv[1:] and count == "0":
    import torch.distributed
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()  # all have printed
    if sys.argv[1:] == [rank]:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def forks(output):
    """For each line that a rank printed: its rank, host, grandparent and restarts; all have found torch imported there."""
    found = re.findall(r"forked (\d) (\S+) (\d+) True True (\d)", output)
    assert output.count("| forked ") == len(found), output
    return sorted((int(rank), host, int(starter), int(count)) for rank, host, starter, count in found)


def test_each_host_has_one_process_that_imports_torch_and_forks_its_ranks_also_after_a_restart(
    make_cluster,
    ttlaunch_on,
    lab,  # noqa: F811 - the fixture
    tmp_path,
):
    cluster = make_cluster(hosts=2)
    lab(cluster.hostfile(slots=2))
    (tmp_path / "forked.py").write_text(FORKED)
    answer = ttlaunch_on(cluster)(
        ["run", "--warm", "--on", "lab", "-n", "4", "--max-restarts", "1", "forked.py", "3"], timeout_s=200
    )
    assert 0 == answer.status, answer.stdout + answer.stderr
    assert "error[R004]: rank 3 (rank, node1) was killed by SIGKILL" in answer.stderr
    places = forks(answer.stdout)
    for count in (0, 1):
        own = [(rank, host, starter) for rank, host, starter, restarts in places if restarts == count]
        assert [(0, "node0"), (1, "node0"), (2, "node1"), (3, "node1")] == [(rank, host) for rank, host, _ in own]
        starters = [starter for *_, starter in own]
        assert starters[0] == starters[1]
        assert starters[2] == starters[3]
    reports = [json.loads(path.read_text()) for path in tmp_path.glob(f"runs/*/{contract.REPORT_FILE}")]
    assert [0, 1] == sorted(report["exit_status"] for report in reports)
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


def test_ranks_of_a_job_of_slurm_are_forked_too_because_agents_start_them_there(slurm4, ttlaunch_on, tmp_path):
    (tmp_path / "forked.py").write_text(FORKED)
    answer = ttlaunch_on(slurm4.cluster)(
        ["run", "--warm", "--on", "slurm:debug", "--nodes", "2", "--time", "5", "-n", "4", "forked.py"], timeout_s=200
    )
    assert 0 == answer.status, answer.stdout + answer.stderr
    places = forks(answer.stdout)
    assert [0, 1, 2, 3] == [rank for rank, *_ in places]
    assert 2 == len({(host, starter) for _, host, starter, _ in places})
