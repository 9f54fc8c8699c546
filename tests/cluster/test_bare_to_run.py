"""From bare hosts to trained parameters, with ttlaunch's own commands alone: prepare, doctor, sync, run."""

import json

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]

ON_FIVE_HOSTS = {
    "fabric_minimal": "--ranks 5 --set all_reduce_config.repeats=2",
    "pipeline_parallel": "--set training_config.steps=3 --set transformer_config.num_blocks=5"
    " --set multihost_config.pipeline_parallel_config.num_blocks=5"
    " --set multihost_config.pipeline_parallel_config.blocks_per_rank=[1,1,1,1,1]",
}


@pytest.fixture(scope="module")
def lab(prepared_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "lab").mkdir()
    (folder / "lab/hosts.txt").write_text(prepared_cluster.hostfile())
    return folder


def test_prepared_hosts_are_ready(prepared_cluster, ttlaunch_on, lab):
    answer = ttlaunch_on(prepared_cluster, cwd=lab)("doctor --on lab --format json")
    assert answer.status == 0, answer.stdout + answer.stderr
    said = json.loads(answer.stdout)
    assert [diagnostic for diagnostic in said["diagnostics"] if diagnostic["severity"] == "error"] == []


def test_sync_brings_one_tree_to_all(prepared_cluster, ttlaunch_on, lab):
    answer = ttlaunch_on(prepared_cluster, cwd=lab)("sync hierarchical_parallel --on lab --format json")
    assert answer.status == 0, answer.stderr
    trees = {
        prepared_cluster.run(host, ["readlink", "/root/.ttlaunch/current"]).stdout for host in prepared_cluster.hosts
    }
    assert len(trees) == 1


def run_on_hosts(prepared_cluster, ttlaunch_on, lab, words, *, hosts):
    """The report of a run that has a rank on each of so many hosts, or one here without hosts."""
    answer = ttlaunch_on(prepared_cluster, cwd=lab)(f"run {words} --format json", timeout_s=200)
    assert answer.status == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["parameters_agree"]
    assert not hosts or [row["host"] for row in report["ranks"]] == prepared_cluster.hosts[:hosts]
    return report


@pytest.mark.parametrize("recipe", ON_FIVE_HOSTS)
def test_other_recipes_run_on_prepared_hosts(prepared_cluster, ttlaunch_on, lab, recipe):
    run_on_hosts(prepared_cluster, ttlaunch_on, lab, f"{recipe} --on lab {ON_FIVE_HOSTS[recipe]}", hosts=5)


def test_four_hosts_and_five_give_the_bits_of_one_process(prepared_cluster, ttlaunch_on, lab):
    ways = {"--ranks 1": 0, "--on lab": 4, "--on lab --set multihost_config.num_workers=3": 5}
    digests = set()
    for words, hosts in ways.items():
        line = f"hierarchical_parallel {words} --set training_config.steps=3"
        digests.add(run_on_hosts(prepared_cluster, ttlaunch_on, lab, line, hosts=hosts)["parameters_sha256"])
    assert len(digests) == 1
