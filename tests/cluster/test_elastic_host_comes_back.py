"""A training over hosts that goes on while a host is away and with it when it is back, with the bits of one process."""

import json
import subprocess
import sys

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from ttlaunch import contract

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS = "--set training_config.steps=600 --set training_config.validation_interval=600"


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The parameters of one process, which has neither hosts nor messages."""
    words = ["run", "data_parallel", "--ranks", "1", *STEPS.split(), "--format", "json"]
    alone = subprocess.run(
        [sys.executable, "-m", "ttlaunch", *words],
        cwd=tmp_path_factory.mktemp("alone"),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(alone.stdout)["parameters_sha256"]


@pytest.fixture
def start(make_cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811 - the fixture
    """Starts an elastic run of a worker on each of three hosts; returns its cluster, its process and its folder once it is under way."""
    started = []

    def train(options):
        cluster = make_cluster(hosts=3, networks=2)
        lab("".join(f"{host} slots=1\n" for host in cluster.hosts))
        words = f"run data_parallel --on lab --ranks 3 --lease 3 {options} {STEPS}"
        started.append(ttlaunch_on(cluster).start(words))
        path = wait_until(lambda: has_done(tmp_path, 20), what="20 steps are done", timeout_s=120)
        return cluster, started[0], path.parents[1]

    yield train
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def has_done(folder, step):
    """The progress of the worker that reports, once it has done so many steps; else None."""
    for path in folder.glob(f"runs/*/{contract.progress_file(0)}"):
        records = filter(None, map(contract.read_record, path.read_text().splitlines()))
        if any(record.get("kind") == contract.KIND_STEP and record["step"] >= step for record in records):
            return path
    return None


def lose(folder):
    wait_until(lambda: "host_lost" in (folder / contract.EVENTS_FILE).read_text(), what="the host is lost")


def members(folder):
    """The members of each epoch, without epochs that only divided the work anew."""
    lines = map(json.loads, (folder / "members.jsonl").read_text().splitlines())
    epochs = [line["members"] for line in lines if line["what"] == "epoch"]
    return [found for at, found in enumerate(epochs) if found not in epochs[:at]]


def end(process, folder):
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    return json.loads((folder / contract.REPORT_FILE).read_text()), stderr


def test_a_host_that_is_cut_off_and_comes_back_gets_a_worker_again_and_the_bits_are_those_of_one_process(
    start, expected
):
    cluster, process, folder = start("--elastic 1:3")
    cluster.link("node1", up=False)
    lose(folder)
    cluster.link("node1", up=True)
    report, stderr = end(process, folder)
    lost = next(epoch for epoch in report["epochs"] if "worker-0001 was on a host that was lost" in epoch["reasons"])
    assert lost["step"] >= 20
    assert [[0, 1, 2], [0, 2], [0, 2, 4]] == members(folder), stderr
    assert expected == report["parameters_sha256"]
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


def test_a_run_that_needs_a_host_waits_while_that_is_off_says_for_whom_and_ends_with_the_bits_of_one_process(
    start, expected
):
    """It waits for longer than the time after which it would count as hung, if it did not know what it waits for."""
    cluster, process, folder = start("--elastic 3:3 --hang-timeout 10")
    cluster.kill("node1")
    lose(folder)
    waits = next(line for line in process.stderr if line.startswith("waiting for"))
    assert waits == (
        "waiting for 1 worker more of 3; ready: worker-0000, worker-0002; worker-0001 was on a host that was lost\n"
    )
    cluster.revive("node1")
    report, stderr = end(process, folder)
    assert [[0, 1, 2], [0, 2, 4]] == members(folder), stderr
    assert expected == report["parameters_sha256"]
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")
