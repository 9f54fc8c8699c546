"""Elastic runs over hosts: a worker of another host dies, another one gets the state over the network, and the bits stay."""

import json
import subprocess
import sys

import pytest

from tests.changed_recipes import slow_recipe
from tests.cluster.hosts import ROOT
from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab as lab  # noqa: PLC0414 - a fixture
from tests.cluster.test_run import leftovers
from ttlaunch import contract

pytestmark = pytest.mark.cluster

STEPS = "--set training_config.steps=40 --set training_config.validation_interval=100"
QUICK = "/root/quick"
"""Where it exists on a host, its workers no longer pause in each step."""


def records(folder, number):
    path = folder / contract.progress_file(number)
    return [contract.read_record(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def sha256_of_one_process(tmp_path_factory):
    words = ["run", "data_parallel", "--ranks", "1", *STEPS.split(), "--format", "json"]
    command = [sys.executable, "-m", "ttlaunch", *words]
    here = subprocess.run(command, cwd=tmp_path_factory.mktemp("here"), capture_output=True, text=True, check=True)
    return json.loads(here.stdout)["parameters_sha256"]


@pytest.fixture
def go_on(cluster4, tmp_path):
    """Makes the recipe `mine`, whose steps pause until `go_on()` is called: a machine may take a minute until its worker takes part."""
    slow_recipe(tmp_path, until=QUICK, pause_s=3)
    for host in cluster4.hosts:
        cluster4.run(host, ["rm", "-f", QUICK])  # of an earlier test on the same hosts
    return lambda: [cluster4.run(host, ["touch", QUICK]) for host in cluster4.hosts]


def give_recipe(cluster, host, folder):
    """Copy a recipe's folder to the home of a host, whose own copy of the built-in one has all files but the trainer."""
    cluster.run(host, ["rm", "-rf", f"/root/{folder.name}"])
    cluster.run(host, ["cp", "-r", str(ROOT / "recipes/data_parallel"), f"/root/{folder.name}"])
    write = ["sh", "-c", f"cat > /root/{folder.name}/trainer.py"]
    cluster.run(host, write, input=(folder / "trainer.py").read_text())


def test_a_worker_that_replaces_one_of_another_host_gets_the_state_over_the_network(
    cluster4, ttlaunch_on, lab, tmp_path, go_on, sha256_of_one_process
):
    lab("".join(f"{host} slots=1\n" for host in cluster4.hosts[:2]))
    process = ttlaunch_on(cluster4).start(
        f"run mine --on lab -n 2 --elastic 1:2 {STEPS} --format json", stdout=subprocess.PIPE
    )

    def folder_with_steps():
        assert process.poll() is None, process.communicate()
        found = [path for path in tmp_path.glob("runs/*") if (path / contract.progress_file(1)).exists()]
        return [path for path in found if any(one["kind"] == contract.KIND_STEP for one in records(path, 1))]

    def replacement_takes_part():
        assert process.poll() is None, process.communicate()
        notes = [one["text"] for one in records(folder, 3) if one["kind"] == contract.KIND_NOTE]
        return any("worker-0003 takes part from step" in text for text in notes)

    (folder,) = wait_until(folder_with_steps, what="a step is done", timeout_s=90)
    [pid] = [one["pid"] for one in records(folder, 1) if one["kind"] == contract.KIND_STARTED]
    cluster4.run("node1", ["kill", "-9", str(pid)])
    wait_until(replacement_takes_part, what="another worker takes part", timeout_s=90)
    go_on()
    stdout, stderr = process.communicate(timeout=200)
    assert 0 == process.returncode, stderr
    assert sha256_of_one_process == json.loads(stdout)["parameters_sha256"]
    wait_until(lambda: not leftovers(cluster4), what="hosts as before the run")


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_worker_of_a_machine_outside_the_cluster_joins_workers_on_hosts_and_changes_no_bit(
    cluster4, ttlaunch_on, lab, tmp_path, hosts, go_on, sha256_of_one_process
):
    lab("".join(f"{host} slots=2\n" for host in cluster4.hosts[:hosts]))
    ttlaunch, place = ttlaunch_on(cluster4), f"{cluster4.ip('launcher')}:0"
    process = ttlaunch.start(
        f"run mine --on lab -n 2 --elastic 1:3 --coordinator {place} {STEPS} --format json", stdout=subprocess.PIPE
    )

    def is_joinable():
        assert process.poll() is None, process.communicate()
        return list(tmp_path.glob(f"runs/*/{contract.COORDINATOR_FILE}"))

    [place] = wait_until(is_joinable, what="the coordinator listens", timeout_s=90)
    answer = ttlaunch("workers latest --invite --format json")
    assert 0 == answer.status, answer.stderr
    invitation = json.loads(answer.stdout)["invitation"]
    words = [sys.executable, "-m", "ttlaunch", "join", invitation["url"], "--format", "json"]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**cluster4.environment("node2"), "PYTHONPATH": str(ROOT)}
    give_recipe(cluster4, "node2", tmp_path / "mine")
    joining = cluster4.popen("node2", words, cwd="/root", env=environment, **streams)
    joining.stdin.write(invitation["token"])
    joining.stdin.close()
    joining.stdin = None

    def members():
        journal = place.parent / "members.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        return [line.get("members") for line in map(json.loads, lines)]

    def three_take_part():
        if joining.poll() is not None:
            pytest.fail("".join(joining.communicate()))
        return any(found and len(found) == 3 for found in members())

    wait_until(three_take_part, what="three take part", timeout_s=200)
    go_on()
    joined, said = joining.communicate(timeout=200)
    stdout, stderr = process.communicate(timeout=200)
    assert (0, 0) == (process.returncode, joining.returncode), stderr + said + joined
    assert "done" == json.loads(joined)["outcome"]
    assert [0, 1, int(json.loads(joined)["worker_id"].removeprefix("worker-"))] in members()
    assert sha256_of_one_process == json.loads(stdout)["parameters_sha256"]
    wait_until(lambda: not leftovers(cluster4), what="hosts as before the run")
