"""Start a process of an engine so that it can never outlive its run, and end it; shared by engines and simulations."""

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
    """Make sure that a process has ended: by asking, and if that does not help within `patience_s`, by force."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def with_home(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with a `HOME`, without which mpirun does nothing; services and containers often have none."""
    if environment.get("HOME"):
        return dict(environment)
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        home = "/"
    return {**environment, "HOME": home}
