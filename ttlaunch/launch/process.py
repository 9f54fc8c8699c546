"""Start mpirun so that it can never outlive its run, and find and end every process that carries the run's id."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ttlaunch import contract
from ttlaunch.agent import TETHER

_MOMENT_S = 0.5
_LOOK_AGAIN_S = 0.02


def start_mpirun(argv: Sequence[str], *, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start mpirun in a session of its own, so that a terminal's Ctrl-C reaches only us; it ends if we are killed.

    Raises:
        OSError: If it cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", TETHER, *argv],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run_processes(run_id: str) -> list[int]:
    """Process ids of this machine whose environment carries the run's id; our own process never does."""
    needle = f"{contract.ENV_RUN_ID}={run_id}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return sorted(found)


def kill_run_processes(run_id: str) -> list[int]:
    """Kill every process that carries the run's id, and say which ones.

    Ranks that mpirun has just told to end get a moment first. A process is pinned by a descriptor before its environment
    is read again, so a process id that was given to somebody else in between is never signalled.
    """
    deadline = time.monotonic() + _MOMENT_S
    while run_processes(run_id) and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
    killed: list[int] = []
    while remaining := [pid for pid in run_processes(run_id) if pid not in killed]:
        for pid in remaining:
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                try:
                    if pid in run_processes(run_id):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                finally:
                    os.close(descriptor)
            killed.append(pid)
    return killed


def end_mpirun(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """Make sure that mpirun has ended: by asking, and if that does not help within `patience_s`, by force."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
