"""Elastic runs over hosts: a worker of another host dies, another one gets the state over the network, and the bits stay."""

import json
import subprocess
import sys

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab as lab  # noqa: PLC0414 - a fixture
from tests.cluster.test_run import leftovers
from ttlaunch import contract

pytestmark = pytest.mark.cluster

STEPS = "--set training_config.steps=250 --set training_config.validation_interval=100"


def records(folder, number):
    path = folder / contract.progress_file(number)
    return [contract.read_record(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_worker_that_replaces_one_of_another_host_gets_the_state_over_the_network(
    cluster4, ttlaunch_on, lab, tmp_path
):
    lab("".join(f"{host} slots=2\n" for host in cluster4.hosts[:2]))
    process = ttlaunch_on(cluster4).start(
        f"run data_parallel --on lab -n 4 --elastic 1:4 {STEPS} --format json", stdout=subprocess.PIPE
    )

    def folder_with_steps():
        assert process.poll() is None, process.communicate()
        found = [path for path in tmp_path.glob("runs/*") if (path / contract.progress_file(3)).exists()]
        return [path for path in found if any(one["kind"] == contract.KIND_STEP for one in records(path, 3))]

    (folder,) = wait_until(folder_with_steps, what="a step is done", timeout_s=90)
    [pid] = [one["pid"] for one in records(folder, 3) if one["kind"] == contract.KIND_STARTED]
    cluster4.run("node1", ["kill", "-9", str(pid)])
    stdout, stderr = process.communicate(timeout=200)
    assert 0 == process.returncode, stderr
    notes = [one["text"] for one in records(folder, 7) if one["kind"] == contract.KIND_NOTE]
    assert any("worker-0007 takes part from step" in text for text in notes), stderr
    (tmp_path / "here").mkdir()
    command = [sys.executable, "-m", "ttlaunch", "run", "data_parallel", *STEPS.split(), "--format", "json"]
    here = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, check=True)
    assert json.loads(here.stdout)["parameters_sha256"] == json.loads(stdout)["parameters_sha256"]
    wait_until(lambda: not leftovers(cluster4), what="hosts as before the run")
