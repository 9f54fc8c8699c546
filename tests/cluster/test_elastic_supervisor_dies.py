"""An elastic run over hosts whose supervisor is killed goes on from what its workers saved there, with the bits of one process."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.test_elastic_host_comes_back import has_done
from tests.cluster.test_run import lab, leftovers  # noqa: F401 - a fixture
from ttlaunch import contract
from ttlaunch.agent.run_processes import tree_below

pytestmark = pytest.mark.cluster

STEPS = "--set training_config.steps=400 --set training_config.validation_interval=400"
ELASTIC = f"--on lab --ranks 3 --elastic 1:3 --lease 3 {STEPS}"
NO_CHECKPOINTS = "--set checkpoint_config.interval=null"


@pytest.fixture
def recipe():
    return "data_parallel"


@pytest.fixture
def lost(make_cluster, ttlaunch_on, lab, tmp_path, recipe):  # noqa: F811 - the fixture
    """A run of a worker on each of three hosts whose supervisor was killed in the middle: cluster, folder, last step seen."""
    cluster = make_cluster(hosts=3)
    lab("".join(f"{host} slots=1\n" for host in cluster.hosts))
    process = ttlaunch_on(cluster).start(f"run {recipe} {ELASTIC} {NO_CHECKPOINTS}")

    def twenty_steps():
        assert process.poll() is None, process.communicate()
        return has_done(tmp_path, 20)

    path = wait_until(twenty_steps, what="20 steps are done", timeout_s=120)
    folder = path.parents[1]
    supervisor = json.loads((folder / contract.LAUNCHER_FILE).read_text())["pid"]
    # As when the machine is switched off: the guard goes, too. In these clusters it would find the processes of all hosts.
    for pid in [*tree_below(supervisor), supervisor]:
        os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert "error[R050]" in stderr
    records = filter(None, map(contract.read_record, path.read_text().splitlines()))
    return cluster, folder, max(one["step"] for one in records if one.get("kind") == contract.KIND_STEP)


def states_on(cluster, host, folder):
    place = f"/root/.ttlaunch/runs/{folder.name}/{contract.LAST_STATES_DIR}"
    return cluster.run(host, ["sh", "-c", f"ls {place} 2>/dev/null || true"]).stdout.split()


@pytest.mark.parametrize("recipe", ["data_parallel", "zero"])
def test_no_step_is_lost_when_the_supervisor_of_a_run_over_hosts_is_killed(lost, ttlaunch_on, tmp_path, recipe):
    """A host of a `zero` run has the slot of its worker, and the slot that this worker shadows."""
    cluster, folder, seen = lost
    resume = f"run {recipe} {ELASTIC} {NO_CHECKPOINTS} --resume latest --format json"
    answer = ttlaunch_on(cluster)(resume, timeout_s=200)
    assert 0 == answer.status, answer.stderr
    report = json.loads(answer.stdout)
    began = report["began_from"]
    assert began["step"] >= seen >= 20
    assert began["saved_by"].startswith("the run's workers" if recipe == "zero" else "worker-000")
    assert [[], [], []] == [states_on(cluster, host, folder) for host in cluster.hosts]
    (tmp_path / "alone").mkdir()
    command = [sys.executable, "-m", "ttlaunch", "run", recipe, "-n", "1", *STEPS.split(), "--format", "json"]
    alone = subprocess.run(command, cwd=tmp_path / "alone", capture_output=True, text=True, check=True)
    assert json.loads(alone.stdout)["parameters_sha256"] == report["parameters_sha256"]
    wait_until(lambda: not leftovers(cluster), what="hosts as before the run")


def test_a_host_that_is_away_and_one_whose_state_was_changed_are_named(lost, ttlaunch_on):
    cluster, folder, seen = lost
    wait_until(lambda: all(states_on(cluster, host, folder) for host in cluster.hosts), what="all hosts have a state")
    [shard] = cluster.path("node0", f"/root/.ttlaunch/runs/{folder.name}").glob(
        f"{contract.LAST_STATES_DIR}/*/*.safetensors"
    )
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    cluster.link("node2", up=False)
    two = ELASTIC.replace("--ranks 3 --elastic 1:3", "--ranks 2 --elastic 1:2")
    answer = ttlaunch_on(cluster)(f"run data_parallel {two} {NO_CHECKPOINTS} --resume {folder.name}", timeout_s=200)
    assert 0 == answer.status, answer.stderr
    step = int(shard.parent.name.removeprefix("step-"))
    assert f"warning[P085]: a newer state of {folder.name} may be on node" in answer.stderr
    assert " = note: node2: " in answer.stderr
    # Both hosts may have saved the same step: then the changed one is refused only if it is looked at first.
    changed = f"node0: the state of step {step} cannot be used: its shard was changed"
    assert changed in answer.stderr or " on node1 saved from memory" in answer.stderr
    assert "warning[P084]: training goes on from step " in answer.stderr
    assert " on node0 saved from memory" not in answer.stderr
    assert step >= seen
