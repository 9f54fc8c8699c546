"""Stacks of processes that cannot tell them, read from outside where py-spy is installed and may look."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.agent.stack_dump import dump_stacks, find_py_spy, render_threads
from ttlaunch.running.hang.stacks import Frame, frame_to_report, parse_main_stack

SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
RUN = f"spy-{os.getpid()}"  # no sweep of another test on this machine ends it
STUCK = "import time\ndef stuck():\n    print('up', flush=True); time.sleep(600)\nstuck()\n"
MAY_LOOK = os.geteuid() == 0 or not SCOPE.exists() or SCOPE.read_text().strip() == "0"


@pytest.fixture
def looks(skip_or_fail):
    """For what needs py-spy, and the right to look into other processes."""
    if find_py_spy() is None or not MAY_LOOK:
        skip_or_fail("py-spy is not installed, or may not look")


@pytest.fixture
def stuck(tmp_path):
    """A process of the run `RUN` that sleeps in a function."""
    (tmp_path / "stuck.py").write_text(STUCK)
    environment = {**os.environ, contract.ENV_RUN_ID: RUN}
    process = subprocess.Popen([sys.executable, "stuck.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_line_that_a_process_is_at_is_found_also_if_it_is_stopped(stuck, tmp_path, is_stopped):
    if is_stopped:
        stuck.send_signal(signal.SIGSTOP)
        os.waitpid(stuck.pid, os.WUNTRACED)
    assert [3] == dump_stacks({3: stuck.pid}, run_id=RUN, run_folder=str(tmp_path), py_spy=find_py_spy())
    frame = frame_to_report(parse_main_stack((tmp_path / contract.stacks_file(3)).read_text()))
    assert ("stuck", 3) == (frame.function, frame.line)


@pytest.mark.usefixtures("looks")
def test_a_process_of_another_run_is_not_looked_into(stuck, tmp_path):
    assert [] == dump_stacks({3: stuck.pid}, run_id=f"{RUN}-not", run_folder=str(tmp_path), py_spy=find_py_spy())
    assert not (tmp_path / contract.stacks_file(3)).exists()


@pytest.mark.parametrize("says", ["echo no; exit 1", "echo '[{}]'", "echo '{'"])
def test_a_py_spy_that_may_not_look_leaves_nothing_said(stuck, tmp_path, says):
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    assert [] == dump_stacks({3: stuck.pid}, run_id=RUN, run_folder=str(tmp_path), py_spy=str(program))


def test_the_main_thread_is_written_last():
    thread = {"pid": 7, "thread_id": 1, "os_thread_id": 7, "frames": [{"filename": "a.py", "line": 3, "name": "main"}]}
    other = {**thread, "os_thread_id": 8, "frames": [{"filename": "b.py", "line": 4, "name": "helper"}]}
    assert (Frame("a.py", 3, "main"),) == parse_main_stack(render_threads([thread, other]))
