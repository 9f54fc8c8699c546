"""A host that is cut off from an elastic run: a simulation has the members, the steps and the outcome of a real run."""

import json

import pytest

from tests.changed_recipes import changed_recipe
from tests.cluster.test_run import lab  # noqa: F401 - a fixture
from tests.running.test_elastic_simulation import SLOW, compare, micro_batch, simulate

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS, LEASE_S, BLOCK = 60, 4.0, 3
PLAN = "cut host=node1 at step=8"


def test_a_host_that_is_cut_off_is_simulated_as_it_goes(make_cluster, ttlaunch_on, lab, tmp_path):  # noqa: F811 - the fixture
    """For the time of its lease, its worker makes steps with the others; how many depends on the machine."""
    cluster = make_cluster(hosts=3)
    hosts = "".join(f"{host} slots=1\n" for host in cluster.hosts)
    lab(hosts)
    changed_recipe(tmp_path, "index, x_BT, y_BT = batch", SLOW, indent=8)
    given = f"--set training_config.steps={STEPS} --set training_config.validation_interval={2 * STEPS}"
    words = f'chaos mine/ --on lab --ranks 3 --elastic 1:3 --lease {LEASE_S:g} {given} --format json --plan "{PLAN}"'
    answer = ttlaunch_on(cluster)(words, timeout_s=280)
    assert 0 == answer.status, answer.stderr
    outcomes = [one["outcome"] for one in json.loads(answer.stdout)["faults"]]
    [folder] = [path for path in tmp_path.glob("runs/[!.]*") if path.is_dir()]
    report = json.loads((folder / "report.json").read_text())

    (tmp_path / "hosts.txt").write_text(hosts)
    leaf_s = micro_batch(folder, report, epoch=0, block=BLOCK)
    spec = {"target": "data_parallel", "ranks": 3, "elastic": "1:3", "hostfile": tmp_path / "hosts.txt"}
    found = simulate(PLAN, leaf_s=leaf_s, start_s=5.0, steps=STEPS, lease_s=LEASE_S, **spec)
    assert [[0, 1, 2], [0, 2]] == [list(one.epoch.members) for one in found.epochs]
    assert ["replaced"] == outcomes
    compare(report, outcomes, found, steps_apart=3, known=leaf_s)
