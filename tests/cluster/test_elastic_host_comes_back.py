"""A training over hosts that goes on while a host is away and with it when it is back, with the bits of one process."""

import json
import subprocess
import sys

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from ttlaunch import contract

pytestmark = pytest.mark.cluster

STEPS = "--set training_config.steps=600 --set training_config.validation_interval=600"
ELASTIC = f"run data_parallel --on lab --ranks 3 --elastic 1:3 --lease 3 {STEPS} --format json"


@pytest.fixture
def training(make_cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811 - the fixture
    """An elastic run of a worker on each of three hosts, in the middle: its cluster, its process and its folder."""
    cluster = make_cluster(hosts=3, networks=2)
    lab("".join(f"{host} slots=1\n" for host in cluster.hosts))
    process = ttlaunch_on(cluster).start(ELASTIC)
    path = wait_until(lambda: has_done(tmp_path, 20), what="20 steps are done", timeout_s=120)
    yield cluster, process, path.parents[1]
    process.terminate()
    process.communicate(timeout=60)


def has_done(folder, step):
    """The progress of the worker that reports, once it has done so many steps; else None."""
    for path in folder.glob(f"runs/*/{contract.progress_file(0)}"):
        records = filter(None, map(contract.read_record, path.read_text().splitlines()))
        if any(record.get("kind") == contract.KIND_STEP and record["step"] >= step for record in records):
            return path
    return None


def test_a_host_that_is_cut_off_and_comes_back_gets_a_worker_again_and_the_bits_are_those_of_one_process(
    training, tmp_path
):
    cluster, process, folder = training
    cluster.link("node1", up=False)
    wait_until(lambda: "host_lost" in (folder / contract.EVENTS_FILE).read_text(), what="the host is lost")
    cluster.link("node1", up=True)
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    report = json.loads(stdout)
    epochs = [
        line["members"]
        for line in map(json.loads, (folder / "members.jsonl").read_text().splitlines())
        if line["what"] == "epoch"
    ]
    lost = next(epoch for epoch in report["epochs"] if "worker-0001 was on a host that was lost" in epoch["reasons"])
    assert lost["step"] >= 20
    assert [[0, 1, 2], [0, 2], [0, 2, 4]] == [
        members for at, members in enumerate(epochs) if members not in epochs[:at]
    ], stderr
    (tmp_path / "alone").mkdir()
    words = [
        sys.executable,
        "-m",
        "ttlaunch",
        "run",
        "data_parallel",
        "--ranks",
        "1",
        *STEPS.split(),
        "--format",
        "json",
    ]
    alone = subprocess.run(words, cwd=tmp_path / "alone", capture_output=True, text=True, check=True)
    assert json.loads(alone.stdout)["parameters_sha256"] == report["parameters_sha256"]
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")
