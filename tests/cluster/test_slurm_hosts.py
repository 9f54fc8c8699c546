"""Slurm runs on the hosts of a test cluster: jobs start, hosts are lost, and a cluster that ends leaves nothing."""

from pathlib import Path

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.slurm import FOLDER, slurm_cluster


def test_a_job_runs_on_every_host_and_leaves_the_queue_empty(slurm4):
    answer = slurm4.run("launcher", ["srun", "--nodes=4", "--ntasks-per-node=1", "hostname"])
    assert (0, [f"node{number}" for number in range(4)]) == (answer.returncode, sorted(answer.stdout.split()))
    wait_until(lambda: not slurm4.queue(), what="the queue of Slurm is empty")


def test_devices_are_those_of_a_step(slurm4):
    answer = slurm4.run("launcher", ["srun", "--gres=gpu:1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"])
    assert "0\n" == answer.stdout, answer.stderr


@pytest.mark.usefixtures("_slurm_can_start")
def test_a_host_whose_slurmd_is_killed_goes_down():
    with slurm_cluster(hosts=2) as slurm:
        state = slurm.cluster.state
        slurm.kill("slurmd", "node1")
        wait_until(lambda: slurm.states()["node1"].startswith("down"), what="Slurm misses node1", timeout_s=30)
        assert "idle" == slurm.states()["node0"]
    assert not state.exists()
    assert not Path(FOLDER, "slurm.conf").exists()
