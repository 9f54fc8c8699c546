"""Start a process that cannot outlive its run, and end it; for engines and simulations."""

import os
import pwd
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.agent import PARENT_DEATH
from ttlaunch.engines.base import EngineProcess


def start_process(argv: Sequence[str], *, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that Ctrl-C reaches only the launcher; it ends if the launcher is killed.

    It gets the umask that `contract.ENV_UMASK` names, if it is set, and not that variable.

    Args:
        argv: The command.
        folder: The folder in which it starts.
        environment: Its variables.

    Raises:
        OSError: The interpreter cannot be started, or `folder` cannot be entered.
    """
    command = [sys.executable, "-I", "-S", PARENT_DEATH, *argv]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **process_options(folder, environment))


def start_at_terminal(argv: Sequence[str], *, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that shares this one's terminal and session, for a debugger in it; otherwise as `start_process`."""
    command = [sys.executable, "-I", "-S", PARENT_DEATH, *argv]
    options = process_options(folder, environment)
    shared = {"stdout": None, "stderr": None, "start_new_session": False}
    return subprocess.Popen(command, **{**options, **shared})


def process_options(folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of `Popen` for a process of an engine, see `start_process`."""
    variables = dict(environment)
    return {
        "cwd": folder,
        "umask": int(variables.pop(contract.ENV_UMASK, "-1"), 8),
        "env": variables,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "start_new_session": True,
    }


def end_process(process: EngineProcess, *, patience_s: float) -> None:
    """End a process by SIGTERM, and by SIGKILL if it still runs after `patience_s` seconds."""
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
