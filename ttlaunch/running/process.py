"""Start mpirun so that it can never outlive its run, and end it."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ttlaunch.agent import TETHER


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
