"""Recipes over gRPC on several hosts: the bits of one machine, nothing that others could use, and the right culprit."""

import json
import subprocess
import sys

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import digest, leftovers
from tests.cluster.test_run import lab as lab  # noqa: PLC0414 - a fixture
from tests.security.listeners import addresses_of
from ttlaunch import contract

pytestmark = pytest.mark.cluster

STEPS = "--set training_config.steps=4 --set training_config.validation_interval=4"
OVER_GRPC = "--set multihost_config.socket_type=grpc"
KEY = "-----BEGIN " + "PRIVATE KEY-----"
STEP = '"kind": "step"'
LONG = f"run data_parallel --on lab --ranks 2 --set training_config.steps=100000 {OVER_GRPC}"


@pytest.mark.parametrize("recipe", ["data_parallel --ranks 4", "zero --ranks 4", "fully_sharded --ranks 4"])
def test_a_recipe_over_hosts_has_the_bits_of_one_machine(cluster4, ttlaunch_on, lab, tmp_path, recipe):
    lab("".join(f"{host} slots=2\n" for host in cluster4.hosts[:2]))
    over_hosts = ttlaunch_on(cluster4)(f"run {recipe} --on lab {STEPS} {OVER_GRPC} --format json", timeout_s=120)
    (tmp_path / "here").mkdir()
    one = [*recipe.split()[:-1], "1"]
    command = [sys.executable, "-m", "ttlaunch", "run", *one, *STEPS.split(), "--format", "json"]
    here = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, check=True)
    assert json.loads(here.stdout)["parameters_sha256"] == digest(over_hosts)
    edges = json.loads(over_hosts.stdout)["traffic"]["edges"]
    assert [] == [edge for edge in edges if edge["bytes"] not in {edge["formula_bytes"], None}]
    wait_until(lambda: not leftovers(cluster4), what="hosts as before the run")


@pytest.fixture
def training(make_cluster, ttlaunch_on, lab, tmp_path):
    """A run of two ranks on two hosts that has done a step: its cluster, its process and its folder."""
    cluster = make_cluster(hosts=2, networks=2)
    lab(cluster.hostfile())
    process = ttlaunch_on(cluster).start(LONG, stdout=subprocess.DEVNULL)

    def has_done_a_step():
        assert process.poll() is None, process.stderr.read()
        return [path for path in tmp_path.glob("runs/*/records/rank-1.progress.jsonl") if STEP in path.read_text()]

    (path,) = wait_until(has_done_a_step, what="a step is done", timeout_s=90)
    yield cluster, process, path.parents[1]
    process.terminate()
    process.communicate(timeout=60)


def test_ranks_listen_on_the_chosen_network_alone_no_file_has_a_key_and_a_killed_one_is_named_with_its_host(training):
    cluster, process, folder = training
    for host in cluster.hosts:
        processes = {pid: words for pid, words in cluster.pids(host).items() if "sshd" not in words}
        ranks = [pid for pid, words in processes.items() if "ttlaunch.runtime" in words]
        assert [cluster.ip(host)] * 2 == [
            str(getattr(found, "ipv4_mapped", None) or found) for found in addresses_of(ranks)
        ]
        assert [] == addresses_of(processes.keys() - ranks)
        assert not any(KEY in words for words in processes.values())
        found = cluster.run(host, ["grep", "-rslF", KEY, "/dev/shm", "/root/.ttlaunch", "/tmp"])
        assert "" == found.stdout
    assert [] == [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]

    lines = (folder / contract.progress_file(1)).read_text().splitlines()
    [pid] = [record["pid"] for record in map(json.loads, lines) if record["kind"] == "started"]
    cluster.run("node1", ["kill", "-9", str(pid)])
    _, stderr = process.communicate(timeout=60)
    report = json.loads((folder / contract.REPORT_FILE).read_text())
    assert (1, "killed") == (report["failure"]["rank"], report["failure"]["class"]), stderr
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")
