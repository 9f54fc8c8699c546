"""From bare hosts to trained parameters, with ttlaunch's own commands alone: prepare, doctor, sync, run."""

import json

import pytest

from tests.cluster.prepared import PREPARE

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]

IMPORTS = "import torch, mpi4py.MPI, numpy, pydantic, yaml, os, sys; print(sys.prefix == os.path.expanduser('~/.ttlaunch/env'))"


@pytest.fixture(scope="module")
def lab(prepared_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "lab").mkdir()
    (folder / "lab/hosts.txt").write_text(prepared_cluster.hostfile(slots=2))
    return folder


def test_bare_hosts_are_ready_for_real_ranks(prepared_cluster, ttlaunch_on, wheels_for_ranks, lab):
    for host in prepared_cluster.hosts:
        imported = prepared_cluster.run(host, ["sh", "-c", f'~/.ttlaunch/env/bin/python -c "{IMPORTS}"'])
        assert imported.stdout == "True\n", imported.stderr
        said = prepared_cluster.run(host, ["sh", "-c", "~/.ttlaunch/env/bin/mpirun --version"]).stdout
        assert said.startswith("mpirun (Open MPI) 5.")
    run = ttlaunch_on(prepared_cluster, cwd=lab)
    answer = run(f"{PREPARE} --check --format json", environment=wheels_for_ranks, timeout_s=200)
    assert ["ready"] * 2 == [host["state"] for host in json.loads(answer.stdout)["hosts"]]


def test_doctor_finds_no_error_on_prepared_hosts(prepared_cluster, ttlaunch_on, lab):
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


def test_prepared_hosts_have_the_bits_of_one_process_here(prepared_cluster, ttlaunch_on, lab):
    digests = set()
    for words, hosts in {"--ranks 1": None, "--on lab": ["node0", "node0", "node1", "node1"]}.items():
        line = f"run hierarchical_parallel {words} --set training_config.steps=3 --format json"
        answer = ttlaunch_on(prepared_cluster, cwd=lab)(line, timeout_s=200)
        assert answer.status == 0, answer.stderr
        report = json.loads(answer.stdout)
        assert report["parameters_agree"]
        assert hosts is None or [row["host"] for row in report["ranks"]] == hosts
        digests.add(report["parameters_sha256"])
    assert len(digests) == 1
