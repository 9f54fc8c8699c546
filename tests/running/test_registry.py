"""Which runs there are and which of them go on: whatever was killed, and whatever the registry's file is."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.running.runs.launcher import Launcher, is_running, read_launcher, this_process, write_launcher
from ttlaunch.running.runs.overview import list_runs, summarise
from ttlaunch.running.runs.registry import Registry, RegistryError, find_registry

ENTER = """\
import pathlib, sys
from ttlaunch.running.runs.registry import Registry
registry = Registry(pathlib.Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    registry.enter(pathlib.Path(f"/runs/{sys.argv[2]}-{number}"), name="r", plan_hash="h", ranks=1)
    print(number, flush=True)
"""


def make_run(folder, name="2026-08-23T10-14-07-3fa1", *, steps=(), report=None, launcher=None):
    run = folder / "runs" / name
    (run / contract.RECORDS_DIR).mkdir(parents=True)
    plan = {"recipe": {"name": "mine"}, "ranks": [{"rank": 0, "host": "box", "slot": 0, "role": "worker"}]}
    (run / contract.PLAN_FILE).write_text(json.dumps(plan))
    records = [
        {"kind": "ready", "time": 1.0, "total_steps": 20},
        *({"kind": "step", "time": 2.0, **one} for one in steps),
    ]
    (run / contract.progress_file(0)).write_text("".join(map(contract.record_line, records)))
    if report:
        (run / contract.REPORT_FILE).write_text(json.dumps(report))
    if launcher:
        (run / contract.LAUNCHER_FILE).write_text(json.dumps(asdict(launcher)))
    return run


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "state" / "runs.sqlite")


def test_a_run_is_entered_and_left_with_its_end(registry, tmp_path):
    run = make_run(tmp_path, report={"status": "failed", "exit_status": 1})
    registry.enter(run, name="mine", plan_hash="abc", ranks=4)
    (entry,) = registry.entries()
    assert (run, run.name, "mine", "abc", None, None) == (
        *(entry.folder, entry.run_id, entry.name, entry.plan_hash),
        *(entry.ended, entry.status),
    )
    registry.leave(run)
    (entry,) = registry.entries()
    assert ("failed", 1) == (entry.status, entry.exit_status)
    assert entry.started <= entry.ended <= time.time()
    registry.forget(run)
    assert [] == registry.entries()


def enter(registry, name, count):
    words = [sys.executable, "-c", ENTER, str(registry.path), name, str(count)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_runs_that_start_at_once_are_all_entered(registry):
    for process in [enter(registry, name, 3) for name in "abcd"]:
        assert ("0\n1\n2\n", 0) == (process.communicate(timeout=60)[0], process.returncode)
    expected = {f"{name}-{number}" for name in "abcd" for number in range(3)}
    assert expected == {entry.folder.name for entry in registry.entries()}


def test_a_file_whose_first_writer_has_only_begun_has_no_runs(registry):
    registry.path.parent.mkdir()
    registry.path.touch()
    assert registry.entries() == []


def test_a_killed_writer_does_no_harm(registry):
    # The test reads nothing while the writer writes without a pause: on a busy machine it might not get its turn for seconds.
    with enter(registry, "cut", 100_000) as writer:
        for _ in range(3):
            writer.stdout.readline()
        writer.kill()
    before = len(registry.entries())
    registry.enter(registry.path.parent, name="after", plan_hash="h", ranks=1)
    assert before + 1 == len(registry.entries())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"this is no database, but long enough to be taken for one" * 50, "file is not a database"),
        (None, "unable to open database file"),
    ],
    ids=["garbage", "a-folder"],
)
def test_a_registry_that_is_none_is_one_error(registry, content, said):
    registry.path.parent.mkdir()
    if content is None:
        registry.path.mkdir()
    else:
        registry.path.write_bytes(content)
    with pytest.raises(RegistryError) as raised:
        registry.enter(registry.path.parent, name="mine", plan_hash="abc", ranks=4)
    assert f"{registry.path}: {said}" == str(raised.value)


def test_a_registry_of_a_newer_version_is_left_alone(registry):
    registry.path.parent.mkdir()
    connection = sqlite3.connect(registry.path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(RegistryError, match="it was written by a newer ttlaunch"):
        registry.entries()


def test_a_locked_registry_is_given_up_after_a_moment(registry):
    registry.enter(registry.path.parent, name="mine", plan_hash="abc", ranks=4)
    holder = sqlite3.connect(registry.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(RegistryError, match="database is locked"):
        Registry(registry.path, patience_s=0.1).enter(registry.path.parent, name="mine", plan_hash="abc", ranks=4)
    holder.close()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_STATE_HOME": "/state", "HOME": "/home/ann"}, "/state/ttlaunch/runs.sqlite"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/home/ann"}, "/home/ann/.local/state/ttlaunch/runs.sqlite"),
        ({"HOME": "/home/ann"}, "/home/ann/.local/state/ttlaunch/runs.sqlite"),
    ],
)
def test_the_registry_is_in_the_users_state_folder(environment, expected):
    assert expected == str(find_registry(environment).path)


def test_without_a_home_there_is_no_registry():
    with pytest.raises(RegistryError, match="neither HOME nor XDG_STATE_HOME is set"):
        find_registry({})


def test_a_run_goes_on_as_long_as_its_launcher_lives(tmp_path):
    run = make_run(tmp_path)
    write_launcher(run)
    assert this_process() == read_launcher(run)
    assert is_running(run)
    (run / contract.REPORT_FILE).write_text('{"status": "done"}')
    assert not is_running(run)


@pytest.mark.parametrize("field", ["machine", "boot", "started"])
def test_another_process_of_the_same_id_is_not_the_launcher(tmp_path, field):
    us = this_process()
    other = Launcher(**{**asdict(us), field: us.started + 1 if field == "started" else "other"})
    assert us.is_alive
    assert not other.is_alive
    assert not other.signal(signal.SIGKILL)


def test_a_killed_launcher_leaves_a_run_that_was_cut_off(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    process.stdout.readline()
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    run = make_run(tmp_path, launcher=Launcher(this_process().machine, this_process().boot, process.pid, started))
    assert ["running"] == [one.state for one in summarise([run])]
    process.kill()
    process.wait()
    process.stdout.close()
    assert ["cut off"] == [one.state for one in summarise([run])]


def test_processes_that_carry_its_id_keep_a_run_going(tmp_path):
    run = make_run(tmp_path, "2026-08-23T10-14-07-aaaa")
    environment = {**os.environ, contract.ENV_RUN_ID: run.name}
    process = subprocess.Popen(["sleep", "60"], env=environment)
    deadline = time.monotonic() + 60
    try:
        while not is_running(run):  # it has no environment for a moment while it becomes another program
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
    assert not is_running(run)


def test_a_run_of_another_machine_is_not_called_cut_off(tmp_path):
    run = make_run(tmp_path, launcher=Launcher("far", "b", 1, 1))
    (one,) = summarise([run])
    assert ("elsewhere", "far", False) == (one.state, one.machine, one.is_over)


def test_a_line_has_the_furthest_step_and_its_loss(tmp_path):
    steps = [{"step": number, "loss": 1.0 / number} for number in range(1, 400)]
    run = make_run(tmp_path, steps=steps, report={"status": "done"})
    (one,) = summarise([run])
    assert ("done", 399, 20, 1.0 / 399, 1, "mine") == (
        *(one.state, one.step, one.total_steps, one.loss),
        *(one.ranks, one.name),
    )
    assert 1787480047.0 == one.started


def test_runs_of_the_registry_and_of_the_folder_are_listed_once(tmp_path, registry):
    here, there = make_run(tmp_path, "2026-01-02T00-00-00-b"), make_run(tmp_path / "other", "2026-01-01T00-00-00-a")
    for run in (here, there, tmp_path / "deleted"):
        registry.enter(run, name="mine", plan_hash="abc", ranks=1)
    runs, problem = list_runs(tmp_path / "runs", registry)
    assert ([there, here], None) == ([run.folder for run in runs], problem)


def test_a_broken_registry_leaves_the_runs_of_the_folder(tmp_path, registry):
    run = make_run(tmp_path)
    registry.path.parent.mkdir()
    registry.path.write_bytes(b"nonsense" * 100)
    runs, problem = list_runs(tmp_path / "runs", registry)
    assert [run] == [one.folder for one in runs]
    assert f"{registry.path}: file is not a database" == str(problem)


def test_workers_that_have_not_started_are_not_counted(tmp_path):
    run = make_run(tmp_path)
    plan = json.loads((run / contract.PLAN_FILE).read_text())
    plan["ranks"] += [{**plan["ranks"][0], "rank": rank, "later": True} for rank in (1, 2)]
    (run / contract.PLAN_FILE).write_text(json.dumps(plan))
    (one,) = summarise([run])
    assert 1 == one.ranks
