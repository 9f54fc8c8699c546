"""The guard beside a run: when the supervisor is killed it leaves nothing of the run, and otherwise it does nothing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ttlaunch.agent import GUARD
from ttlaunch.agent.run_processes import run_processes
from ttlaunch.running.guard import guarded

RUN = "guarded-run"
ESCAPED = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)\n"
SUPERVISOR = """\
import pathlib, sys, time
from ttlaunch.running.guard import guarded
with guarded(sys.argv[1], pathlib.Path(sys.argv[2])):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def left(tmp_path, until):
    """What a run leaves: a process that escaped from everything but its environment, and a folder."""
    (tmp_path / "ttl-x").mkdir()
    (tmp_path / "ttl-x/socket").write_text("")
    run_id = f"{RUN}-{os.getpid()}"
    subprocess.run([sys.executable, "-c", ESCAPED], env={**os.environ, "TTLAUNCH_RUN_ID": run_id}, check=True)
    until(lambda: run_processes(run_id), within_s=20, what="the process is there")
    yield run_id, tmp_path / "ttl-x"
    for pid in run_processes(run_id):
        os.kill(pid, signal.SIGKILL)


def guards():
    """Process ids of the guards that this process started, with their environments; other tests have guards, too."""
    found = {}
    for pid in Path("/proc/self/task").joinpath(str(os.getpid()), "children").read_text().split():
        with contextlib.suppress(OSError):
            if GUARD.encode() in Path("/proc", pid, "cmdline").read_bytes().split(b"\0"):
                found[int(pid)] = Path("/proc", pid, "environ").read_bytes()
    return found


def test_a_killed_supervisor_leaves_neither_a_process_nor_a_folder(left, until):
    run_id, folder = left
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, run_id, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TTLAUNCH_RUN_ID": "of-another-run"},
        start_new_session=True,
    )
    with supervisor:
        assert supervisor.stdout.readline() == "ready\n"
        os.killpg(supervisor.pid, signal.SIGKILL)
    until(lambda: not run_processes(run_id) and not folder.exists(), within_s=20, what="nothing is left")


def test_a_run_that_ends_as_it_should_is_left_alone(left, until):
    run_id, folder = left
    with guarded(run_id, folder):
        [guard] = until(guards, within_s=20, what="the guard is there")
        assert b"TTLAUNCH_" not in guards()[guard]
        assert os.getsid(guard) == guard
    assert guard not in guards()
    assert len(run_processes(run_id)) == 1
    assert folder.exists()


def test_a_supervisor_that_dies_before_it_has_said_what_for_leaves_no_guard():
    with subprocess.Popen([sys.executable, "-I", "-S", GUARD], stdin=subprocess.PIPE) as guard:
        guard.stdin.write(json.dumps({"run_id": "x"}).encode())
        guard.stdin.close()
        assert guard.wait(20) == 0


def test_a_guard_imports_nothing_that_takes_long_while_ranks_start(tmp_path):
    command = [sys.executable, "-X", "importtime", "-I", "-S", GUARD]
    order = json.dumps({"run_id": RUN, "scratch": str(tmp_path), "daemons": []}).encode()
    done = subprocess.run(command, input=order + b"\n.", capture_output=True, check=True)
    imported = {line.rpartition(b"|")[2].strip().decode() for line in done.stderr.splitlines()}
    assert "os" in imported
    assert set() == imported & {"enum", "json", "re", "signal", "struct", "subprocess", "ttlaunch"}
