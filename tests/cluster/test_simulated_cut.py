"""A host that is cut off from an elastic run: a simulation has the members, the steps and the outcome of a real run."""

import json

import pytest

from tests.cluster.test_run import lab  # noqa: F401 - a fixture
from tests.running.test_elastic_simulation import compare, micro_batch, micro_batch_of_tasks, simulate, slow_members

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS, LEASE_S, BLOCK = 60, 4.0, 3
PLAN = "cut host=node1 at step=8"


@pytest.mark.parametrize(("recipe", "apart"), [("data_parallel", 3), ("elastic_dp", 5)])
def test_a_host_that_is_cut_off_is_simulated_as_it_goes(make_cluster, ttlaunch_on, lab, tmp_path, recipe, apart):  # noqa: F811 - the fixture
    """For the time of its lease, its worker makes steps with the others, or brings gradients to the server; how many depends on the machine."""
    elastic = "2:3" if recipe == "elastic_dp" else "1:3"
    cluster = make_cluster(hosts=3)
    hosts = "".join(f"{host} slots=1\n" for host in cluster.hosts)
    lab(hosts)
    slow_members(tmp_path, recipe)
    given = f"--set training_config.steps={STEPS} --set training_config.validation_interval={2 * STEPS}"
    words = (
        f'chaos mine/ --on lab --ranks 3 --elastic {elastic} --lease {LEASE_S:g} {given} --format json --plan "{PLAN}"'
    )
    answer = ttlaunch_on(cluster)(words, timeout_s=280)
    assert 0 == answer.status, answer.stderr
    outcomes = [one["outcome"] for one in json.loads(answer.stdout)["faults"]]
    [folder] = [path for path in tmp_path.glob("runs/[!.]*") if path.is_dir()]
    report = json.loads((folder / "report.json").read_text())

    (tmp_path / "hosts.txt").write_text(hosts)
    has_tasks = recipe == "elastic_dp"
    leaf_s = micro_batch_of_tasks(folder, 2) if has_tasks else micro_batch(folder, report, epoch=0, block=BLOCK)
    spec = {"target": recipe, "ranks": 3, "elastic": elastic, "hostfile": tmp_path / "hosts.txt"}
    found = simulate(PLAN, leaf_s=leaf_s, start_s=5.0, steps=STEPS, lease_s=LEASE_S, **spec)
    assert [[0, 1, 2], [0, 2]] == [list(one.epoch.members) for one in found.epochs]
    assert ["replaced"] == outcomes
    compare(report, outcomes, found, steps_apart=apart, known=leaf_s)
