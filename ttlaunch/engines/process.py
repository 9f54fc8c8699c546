"""Start a process that cannot outlive its run, and end it; for engines and simulations."""

import os
import pwd
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ttlaunch.agent import PARENT_DEATH


def start_process(argv: Sequence[str], *, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that a terminal's Ctrl-C reaches only us; it ends if we are killed.

    Raises:
        OSError: If it cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", PARENT_DEATH, *argv],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def end_process(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """End a process by SIGTERM, and by SIGKILL if it is still there after `patience_s`."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def with_home(environment: Mapping[str, str]) -> dict[str, str]:
    """Add a `HOME` to an environment without one: services and containers often have none, and mpirun needs it."""
    if environment.get("HOME"):
        return dict(environment)
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = "/"
    return {**environment, "HOME": home}
