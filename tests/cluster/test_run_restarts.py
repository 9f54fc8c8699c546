"""`--max-restarts` over hosts: when a host is lost the others go on from the newest checkpoint, with the same bits."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from tests.cluster.test_run_faults import agents

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

TINY = """\
training_config: {steps: 250, batch_size: 6, micro_batch_size: 2, validation_sequences: 4}
transformer_config: {num_blocks: 1, num_heads: 2, embedding_dim: 16, max_sequence_length: 16}
checkpoint_config: {interval: 5}
"""


def test_ctrl_c_ends_the_wait_for_a_lost_host(make_cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811 - the fixture
    cluster = make_cluster(hosts=2)
    lab(cluster.hostfile())
    (tmp_path / "wait.sh").write_text("echo up\nexec sleep 600\n")
    process = ttlaunch_on(cluster).start("run --on lab --ranks 2 --max-restarts 1 --lease 60 -- sh wait.sh")
    wait_until(lambda: len(list(tmp_path.glob("runs/*/logs/rank-*.stdout"))) == 2, what="both ranks", timeout_s=60)
    [agent] = agents(cluster, "node1")
    os.kill(agent, signal.SIGKILL)
    lines = []
    while not any(line.startswith("waiting ") for line in lines):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert (process.returncode, stderr) == (130, "")
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The bits that one process has."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "train.yaml").write_text(TINY)
    line = "run data_parallel -c train.yaml --set multihost_config.enabled=false --format json"
    command = [sys.executable, "-m", "ttlaunch", *line.split()]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)["parameters_sha256"]


@pytest.fixture
def after_a_power_cut(make_cluster, ttlaunch_on, lab, tmp_path, unbroken):  # noqa: F811 - the fixture
    """Trains with a number of workers on three hosts, the second of which loses its power; ends as one process would."""

    def train(workers):
        cluster = make_cluster(hosts=3)
        lab(cluster.hostfile())
        (tmp_path / "train.yaml").write_text(TINY)
        options = f"data_parallel -c train.yaml --set multihost_config.num_workers={workers} --format json"
        process = ttlaunch_on(cluster).start(f"run {options} --on lab --max-restarts 1 --lease 3")
        wait_until(lambda: list(tmp_path.glob("runs/*/checkpoints/step-5")), what="a checkpoint", timeout_s=60)
        cluster.kill("node1")
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        report = json.loads(stdout)
        assert report["parameters_sha256"] == unbroken
        assert [row["host"] for row in report["ranks"]] == ["node0", "node2"]
        assert report["began_from"]["step"] > 0
        [earlier] = report["earlier"]
        assert (earlier["failure"]["code"], earlier["failure"]["host"]) == ("R012", "node1")
        wait_until(lambda: not leftovers(cluster, hosts=["node0", "node2"]), what="hosts as before the run")
        return stderr.splitlines()[-1].replace(earlier["run_id"], "RUN")

    return train


def test_after_a_power_cut_the_remaining_hosts_end_with_the_bits_of_an_unbroken_run(after_a_power_cut):
    assert after_a_power_cut(workers=3) == (
        "restart 1 of 1, from the newest checkpoint of RUN, without node1, 2 ranks instead of 3"
        " (`--set multihost_config.num_workers=2`)"
    )


def test_a_spare_host_takes_the_place_of_one_that_lost_its_power(after_a_power_cut):
    told = "restart 1 of 1, from the newest checkpoint of RUN, without node1, with the spare host node2"
    assert after_a_power_cut(workers=2) == told
