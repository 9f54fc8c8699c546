"""Commands on runs: `ps`, `logs`, `stop`; one way to name a run for all of them."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.cli.ps import render_age
from ttlaunch.running.runs.facts import run_folders
from ttlaunch.running.runs.launcher import Launcher, is_running
from ttlaunch.running.runs.registry import find_registry

ROLES = ("worker", "worker", "optimizer")


@pytest.fixture
def make_run(here):
    """`make_run(name, prints=…)`: the folder of a run of three ranks that have printed."""

    def make(name="2026-08-23T10-14-07-3fa1", *, prints=(), status="done", runs=here / "runs", launcher=None):
        run = runs / name
        for folder in (contract.LOGS_DIR, contract.RECORDS_DIR):
            (run / folder).mkdir(parents=True)
        rows = [{"rank": rank, "host": "box", "slot": rank, "role": role} for rank, role in enumerate(ROLES)]
        (run / contract.PLAN_FILE).write_text(json.dumps({"recipe": {"name": "mine"}, "ranks": rows}))
        lengths = {}
        for number, (rank, stream, data) in enumerate(prints):
            name = contract.stdout_file(rank) if stream == 1 else contract.stderr_file(rank)
            with (run / name).open("ab") as file:
                file.write(data)
            lengths[name] = lengths.get(name, 0) + len(data)
            with (run / contract.times_file(rank)).open("a") as file:
                file.write(f"{number}.0 {stream} {lengths[name]}\n")
        if status:
            (run / contract.REPORT_FILE).write_text(json.dumps({"status": status, "exit_status": 0}))
        if launcher:
            (run / contract.LAUNCHER_FILE).write_text(json.dumps(asdict(launcher)))
        return run

    return make


PRINTS = [(2, 1, b"first\n"), (0, 1, b"same\n"), (1, 1, b"same\n"), (0, 2, b"wrong\n"), (2, 1, b"\xff last")]


def test_logs_shows_lines_in_order_and_folds_equal_ones(ttlaunch, make_run):
    make_run(prints=PRINTS)
    expected = "rank 2 optimizer | first\n×2 ranks 0-1 | same\nrank 0 worker | wrong\nrank 2 optimizer | \ufffd last\n"
    assert (0, expected) == ((answer := ttlaunch("logs")).status, answer.stdout.replace("\udcff", "\ufffd"))


def test_logs_of_one_role_and_stream(ttlaunch, make_run):
    make_run(prints=PRINTS)
    assert "×2 ranks 0-1 | same\n" == ttlaunch("logs 3fa1 --only role=worker --stream stdout").stdout
    assert "rank 0 worker | wrong\n" == ttlaunch("logs 2026-08 --only rank=0-1 --stream stderr -f").stdout


def test_logs_as_json_lines(ttlaunch, make_run):
    make_run(prints=PRINTS)
    lines = [json.loads(line) for line in ttlaunch("logs latest --format json --only rank=2").stdout.splitlines()]
    assert [("first", 0, 6, "optimizer", "box"), ("\ufffd last", 6, 6, "optimizer", "box")] == [
        (line["text"], line["offset"], line["length"], line["role"], line["host"]) for line in lines
    ]


def test_logs_know_a_worker_that_joined_and_say_where_its_output_is(ttlaunch, make_run):
    run = make_run(prints=PRINTS[:1])
    plan = json.loads((run / contract.PLAN_FILE).read_text())
    plan["ranks"][2]["later"] = True
    (run / contract.PLAN_FILE).write_text(json.dumps(plan))
    (run / "members.jsonl").write_text(json.dumps({"what": "joined", "worker": 3, "host": "10.0.0.9"}) + "\n")
    said = (
        "note: what worker-0003 (10.0.0.9) printed is where its `ttlaunch join` ran: `ttlaunch logs` there shows it\n"
    )
    answer = ttlaunch("logs")
    assert ("worker-0002 | first\n", said) == (answer.stdout, answer.stderr)
    answer = ttlaunch("logs --only rank=3")
    assert (0, "", said) == (answer.status, answer.stdout, answer.stderr)
    assert ("worker-0002 | first\n", "") == ((answer := ttlaunch("logs --only worker-0002")).stdout, answer.stderr)
    known = "it has `role=worker`, `role=optimizer`, `host=box`, `host=10.0.0.9`, `worker-0000`, `worker-0001`, "
    assert known in ttlaunch("logs --only worker-9").stderr


def test_only_that_names_nothing_says_what_there_is(ttlaunch, make_run):
    make_run()
    answer = ttlaunch("logs --only role=wroker")
    assert answer.status == contract.STATUS_USAGE
    assert answer.stderr == (
        "error[P040]: `--only role=wroker` names no rank of this run\n"
        " = note: it has `role=worker`, `role=optimizer`, `host=box`, `rank=0`, `rank=1` and `rank=2`\n\n"
        "hint: did you mean `role=worker`?\n\n"
    )


def test_a_stream_that_is_none(ttlaunch, make_run):
    answer = ttlaunch("logs --stream stdot")
    assert answer.status == contract.STATUS_USAGE
    assert answer.stderr == (
        "error[P041]: `--stream stdot` is neither `stdout` nor `stderr`\n\nhint: did you mean `stdout`?\n\n"
    )


def test_a_run_is_named_by_a_part_of_its_id_a_path_or_the_registry(ttlaunch, make_run, here, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    make_run("2026-08-23T10-14-07-3fa1", prints=[(0, 1, b"a\n")])
    make_run("2026-08-24T10-14-07-77b2", prints=[(0, 1, b"b\n")])
    far = make_run("2026-08-25T10-14-07-c0de", prints=[(0, 1, b"c\n")], runs=here / "elsewhere")
    find_registry(os.environ).enter(far, name="mine", plan_hash="h", ranks=3)
    said = {name: ttlaunch(["logs", name]).stdout for name in ("3fa1", "2026-08-24", "latest", str(far), "c0de")}
    assert {"3fa1": "a", "2026-08-24": "b", "latest": "b", str(far): "c", "c0de": "c"} == {
        name: text.removeprefix("rank 0 worker | ").strip() for name, text in said.items()
    }


def test_a_name_of_several_runs_or_of_none_is_refused_with_what_is_near(ttlaunch, make_run, here, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    make_run("2026-08-23T10-14-07-3fa1")
    make_run("2026-08-24T10-14-07-77b2")
    several = ttlaunch("logs 2026")
    assert several.status == contract.STATUS_USAGE
    assert several.stderr == (
        "error[P030]: `2026` may mean 2 runs\n"
        " = note: these are `2026-08-23T10-14-07-3fa1` and `2026-08-24T10-14-07-77b2`\n\n"
        "hint: type more of its name\n\n"
    )
    assert ttlaunch("logs 2026-08-23T10-14-07-3fa2").stderr == (
        "error[P030]: `2026-08-23T10-14-07-3fa2` names no run in runs and no path to one\n\n"
        "hint: did you mean `2026-08-23T10-14-07-3fa1`?\n\nhint: `--runs-dir DIR` names the folder of runs\n\n"
    )
    assert "hint: did you mean `latest`?\n" in ttlaunch("logs lates").stderr


def test_ps_shows_what_runs_and_all_on_demand(ttlaunch, make_run, here, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    assert "no run goes on\n" == ttlaunch("ps").stdout
    run = make_run()
    assert "no run goes on; `ttlaunch ps --all` shows 1 run that ended\n" == ttlaunch("ps").stdout
    heading, line = ttlaunch("ps --all").stdout.splitlines()
    assert ["run", "state", "step", "loss", "age", "ranks", "name", "folder"] == heading.split()
    assert [run.name, "done"] == line.split()[:2]
    assert ["3", "mine", f"runs/{run.name}"] == line.split()[-3:]
    (found,) = json.loads(ttlaunch("ps --all --format json").stdout)["runs"]
    assert (run.name, str(run), "done", 3) == (found["run_id"], found["folder"], found["state"], found["ranks"])


def test_ps_without_a_registry_warns_once_and_shows_the_folder(ttlaunch, make_run, here, monkeypatch):
    (here / "ttlaunch").mkdir()
    (here / "ttlaunch/runs.sqlite").write_bytes(b"nonsense" * 100)
    monkeypatch.setenv("XDG_STATE_HOME", str(here))
    run = make_run()
    answer = ttlaunch("ps --all")
    assert (0, True) == (answer.status, run.name in answer.stdout)
    assert answer.stderr == (
        f"warning[R047]: the registry of runs cannot be used: {here}/ttlaunch/runs.sqlite: file is not a database\n"
        " = note: only runs in runs are shown\n\n"
    )


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7200, "2 h"), (86400 * 3, "3 d")]
)
def test_ages_are_in_their_largest_unit(seconds, expected):
    assert expected == render_age(seconds)


LAUNCHER = """\
import pathlib, signal, sys, time
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
print("ready", flush=True)
while len(heard) < int(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.fixture
def launcher():
    """`launcher(n)`: a process that ends at its n-th interrupt, as a launcher."""
    started = []

    def start(interrupts):
        process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(interrupts)], stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Launcher(socket.gethostname(), boot, process.pid, int(fields[19]))

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_stop_waits_until_the_launcher_has_ended(ttlaunch, make_run, launcher):
    run = make_run(status=None, launcher=launcher(1))
    answer = ttlaunch("stop latest")
    first, second = answer.stdout.splitlines()
    assert (0, f"{run.name}: told to end") == (answer.status, first)
    assert second.startswith(f"{run.name} has ended after ")
    assert second.endswith(": cut off")


def test_stop_presses_on_when_its_grace_is_over(ttlaunch, make_run, launcher):
    run = make_run(status=None, launcher=launcher(2))
    said = ttlaunch("stop latest --grace 0.2").stdout.splitlines()
    assert [f"{run.name}: told to end", f"{run.name}: told to hurry"] == said[:2]


def test_stop_now_does_not_wait_and_a_stopped_launcher_wakes_up(ttlaunch, make_run, launcher):
    process = launcher(3)
    os.kill(process.pid, signal.SIGSTOP)
    run = make_run(status=None, launcher=process)
    said = ttlaunch("stop latest --now").stdout.splitlines()
    assert [f"{run.name}: told to {how}" for how in ("end", "hurry", "end at once")] == said[:3]
    assert not is_running(run)


def test_stop_of_a_run_that_is_over_says_so(ttlaunch, make_run):
    run = make_run()
    assert (0, f"{run.name} is not running: done\n") == ((answer := ttlaunch("stop latest")).status, answer.stdout)
    said = json.loads(ttlaunch("stop latest --format json").stdout)
    expected = {"run_id": run.name, "was_running": False, "state": "done", "step": 0}
    assert {"schema": "ttlaunch.stop/1", **expected} == said


def test_stop_of_a_run_without_a_launcher_ends_its_processes(ttlaunch, make_run):
    run = make_run("2026-08-23T10-14-07-beef", status=None)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, contract.ENV_RUN_ID: run.name}) as process:
        said = ttlaunch("stop latest").stdout
    assert f"{run.name} had lost its launcher; 1 remaining process killed: cut off\n" == said
    assert -signal.SIGKILL == process.returncode


def test_stop_of_another_machines_run_names_the_machine(ttlaunch, make_run):
    run = make_run(status=None, launcher=Launcher("far", "b", 1, 1))
    answer = ttlaunch("stop latest")
    assert answer.stderr == (
        f"error[R049]: the run {run.name} was started on far\n\nhint: `ssh far ttlaunch stop {run}`\n\n"
    )


@pytest.mark.mpi
def test_a_run_goes_on_without_a_home_and_stop_ends_it(here, ttlaunch, monkeypatch):
    monkeypatch.setenv(
        "XDG_STATE_HOME", str(here / "state")
    )  # `ps` shows the runs of other tests at the same time otherwise
    (here / "work.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(120)\n")
    environment = {name: value for name, value in os.environ.items() if name not in {"XDG_STATE_HOME", "HOME"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "ttlaunch", "run", "work.py", "-n", "2"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "begun" not in process.stdout.readline():
        assert process.poll() is None
    assert ["running"] == [run["state"] for run in json.loads(ttlaunch("ps --format json").stdout)["runs"]]
    answer = ttlaunch("stop latest --now")
    _, said = process.communicate(timeout=20)
    assert (0, 130) == (answer.status, process.returncode)
    assert ": interrupted\n" in answer.stdout
    assert said.startswith(
        "warning[R047]: the registry of runs cannot be used: there is no home folder: neither HOME nor XDG_STATE_HOME is set\n"
    )
    assert said.count("R047") == 1


def test_the_latest_of_two_runs_of_one_second_is_the_one_that_was_planned_last(ttlaunch, here):
    (here / "work.py").write_text("")
    for number, end in enumerate(("ffff", "0000", "8888")):
        folder = here / f"runs/2026-08-23T10-14-07-{end}"
        folder.mkdir(parents=True)
        plan = {"ranks": [{"rank": 0, "host": "box", "slot": 0, "role": "rank"}], "command": {"name": "work"}}
        (folder / contract.PLAN_FILE).write_text(json.dumps(plan))
        os.utime(folder / contract.PLAN_FILE, ns=(10**18 + number, 10**18 + number))
    assert ["ffff", "0000", "8888"] == [path.name[-4:] for path in run_folders(here / "runs")]
    assert "runs/2026-08-23T10-14-07-8888" in ttlaunch("report").stdout
