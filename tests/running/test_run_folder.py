"""The run folder: names that sort by time, what a run was started from, and no value of the environment."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

from ttlaunch.agent.claims import claim
from ttlaunch.agent.run_processes import kill_run_processes, run_processes
from ttlaunch.errors import RunFolderError
from ttlaunch.hosts.transport.local import is_this_machine
from ttlaunch.running.runs import record_inputs
from ttlaunch.running.runs.record_inputs import tree_hash
from ttlaunch.running.runs.run_folder import create_run_folder, scratch_folder

CANARY = "sk-canary-0123"


def test_names_of_runs_sort_by_time_and_never_repeat(here):
    now = datetime(2026, 8, 23, 10, 14, 7, tzinfo=UTC)
    names = {create_run_folder(here / "runs", now=now).run_id for _ in range(20)}
    assert len(names) == 20
    assert all(re.fullmatch(r"2026-08-23T10-14-07-[0-9a-f]{4}", name) for name in names)


def test_runs_are_never_committed(here):
    create_run_folder(here / "runs")
    assert (here / "runs/.gitignore").read_text() == "*\n"


def test_a_place_that_cannot_be_written_says_why(here):
    (here / "runs").touch()
    with pytest.raises(RunFolderError, match=r"the run folder cannot be made: .*runs: file exists"):
        create_run_folder(here / "runs")


def test_a_full_disk_is_named_by_the_folder_and_nothing_is_left(here, monkeypatch):
    def refuse(*_words, **_more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)  # a disk that is full for files and not for folders
    with pytest.raises(RunFolderError, match=r"the run folder cannot be made: .*runs: no space left on device"):
        create_run_folder(here / "runs")
    assert not (here / "runs").exists()


def test_a_tree_hash_sees_names_and_contents_but_no_byte_code(here):
    (here / "a").mkdir()
    (here / "a/x.py").write_text("1")
    first = tree_hash(here / "a")
    (here / "a/__pycache__").mkdir()
    (here / "a/__pycache__/x.pyc").write_text("compiled")
    assert tree_hash(here / "a") == first
    (here / "a/x.py").rename(here / "a/y.py")
    assert tree_hash(here / "a") != first


def test_folders_for_sockets_of_killed_runs_are_removed_and_others_stay(here):
    with scratch_folder() as own:
        abandoned = own.with_name(f"ttl-test-{os.getpid()}")
        os.close(claim(str(abandoned), "launcher"))
        with scratch_folder() as second:
            assert (abandoned.exists(), own.exists(), second.exists()) == (False, True, True)
            assert own.stat().st_mode & 0o777 == 0o700
    assert (own.exists(), second.exists()) == (False, False)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", socket.gethostname()])
def test_names_of_this_machine_are_local(host):
    assert is_this_machine(host)


@pytest.mark.parametrize("host", ["localhost2", "128.0.0.1", "far-away.example.org", f"x{socket.gethostname()}"])
def test_names_of_other_machines_are_not_local(host):
    assert not is_this_machine(host)


def test_only_processes_with_the_whole_run_id_are_killed(here):
    def start(run_id):
        return subprocess.Popen(["sleep", "60"], env={**os.environ, "TTLAUNCH_RUN_ID": run_id}, start_new_session=True)

    ours, other = start(f"test-{os.getpid()}"), start(f"test-{os.getpid()}-other")
    try:
        assert kill_run_processes(f"test-{os.getpid()}") == [ours.pid]
        assert ours.wait(5) == -9
        assert run_processes(f"test-{os.getpid()}") == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.mpi
def test_a_run_writes_names_of_variables_but_no_value_of_a_secret(here, start_run, monkeypatch):
    monkeypatch.setenv("TT_TOKEN", CANARY)
    (here / "work.py").write_text("import os\nassert os.environ['TT_TOKEN']\n")
    run = start_run("work.py")
    assert run.ends(within_s=30) == 0
    holding = [path.name for path in run.run_folder.rglob("*") if path.is_file() and CANARY in path.read_text()]
    assert holding == []
    variables = json.loads((run.run_folder / "environment.json").read_text())["variables"]
    assert (variables["TT_TOKEN"], variables["TT_RUN_RANK"]) == ("shell", "rank 0")


@pytest.mark.mpi
def test_a_finished_run_has_all_its_files(here, start_run):
    run = start_run("fabric_minimal", "-n", "1", "--set", "all_reduce_config.megabytes=0.1")
    assert run.ends(within_s=60) == 0
    files = {str(path.relative_to(run.run_folder)) for path in run.run_folder.rglob("*") if path.is_file()}
    assert files == {
        "code.json",
        "command.sh",
        "environment.json",
        "events.jsonl",
        "hosts.txt",
        "launcher.json",
        "logs/merged.jsonl",
        "logs/mpirun.stderr",
        "logs/mpirun.stdout",
        "logs/supervisor.stderr",
        "logs/supervisor.stdout",
        "logs/rank-0.stderr",
        "logs/rank-0.stdout",
        "logs/rank-0.times",
        "metrics.jsonl",
        "plan.json",
        "rankfile.txt",
        "records/rank-0.exit.json",
        "records/rank-0.ledger.jsonl",
        "records/rank-0.progress.jsonl",
        "report.json",
        "train.yaml",
    }
    assert "  megabytes: 0.1  # --set\n" in (run.run_folder / "train.yaml").read_text()


@pytest.mark.mpi
def test_a_run_can_be_repeated_from_its_own_training_file(here, ttlaunch, start_run):
    sets = "--set training_config.steps=2 --set transformer_config.num_blocks=1"
    first = json.loads(ttlaunch(f"plan hierarchical_parallel -n 1 {sets} --format json").stdout)
    run = start_run("hierarchical_parallel", "-n", "1", *sets.split())
    assert run.ends(within_s=90) == 0
    train = run.run_folder / "train.yaml"
    again = json.loads(ttlaunch(f"plan hierarchical_parallel -n 1 -c {train} --format json").stdout)
    assert again["hash"] == first["hash"] == run.report["plan_hash"]


def test_the_recorded_versions_are_those_that_an_import_would_find(here, monkeypatch):
    (here / "numpy-0.1.dist-info").mkdir()
    (here / "pydantic.egg-info").mkdir()  # as `setup.py develop` leaves it, without a version in its name
    (here / "pydantic.egg-info/PKG-INFO").write_text("Name: pydantic\nVersion: 0.2\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    found = record_inputs._versions()

    assert found["numpy"] == "0.1"
    assert found["torch"] == version("torch")
    monkeypatch.setattr(sys, "path", [str(here)])
    assert record_inputs._versions() == {"ttlaunch": found["ttlaunch"], "numpy": "0.1", "pydantic": "0.2"}
