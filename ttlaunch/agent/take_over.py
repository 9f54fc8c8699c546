"""Take the place of an agent whose host the launcher had given up: end it, and whatever is left of the run on this host.

The host may have been cut off, may have slept, or its agent may have been killed. Nothing that ran there before may meet
what is started there now. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time

from ttlaunch.agent.claims import connect
from ttlaunch.agent.run_processes import is_gone, kill_run_processes
from ttlaunch.agent.stop_marker import forget_farewell

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any

_ENDS_S, _LOOK_S = 2.0, 0.01
_AGENT = "agent"


def take_over(arguments: dict[str, Any]) -> None:
    """End what an earlier agent of the run has left here.

    Args:
        arguments: Those of `start_agent`, and `replaces`: the process of the earlier agent; None if it is not known.
    """
    folder, own = os.path.split(arguments["socket"])
    if arguments["replaces"] is not None:
        _end_agent(arguments["replaces"], folder)
    # A machine with two names has two agents, which find the processes of a run by the same id. The ranks of the one that
    # was replaced have ended with it: the kernel signals the process that started them.
    if not any(_answers(os.path.join(folder, name)) for name in _agents_in(folder) if name != own):
        kill_run_processes(arguments["run_id"], grace_s=0.0, daemons=arguments.get("daemons", ()))
    forget_farewell(arguments["folder"])


def _end_agent(pid: int, folder: str) -> None:
    """Kill a process if it is an agent of the run whose folder in shared memory this is, and wait for its end."""
    try:
        descriptor = os.pidfd_open(pid)  # so the signal goes to the process that was looked at
    except OSError:
        return
    try:
        if not _has_open(pid, folder):
            return
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(descriptor)
    deadline = time.monotonic() + _ENDS_S
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _has_open(pid: int, folder: str) -> bool:
    """Whether a process has a file in a folder open, as an agent has its claim."""
    found = False
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found = found or os.path.dirname(os.readlink(f"/proc/{pid}/fd/{name}")) == folder
    return found


def _agents_in(folder: str) -> list[str]:
    """Return the names of the sockets on which agents of a run listen or have listened."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [name for name in names if name.startswith(_AGENT) and _is_socket(os.path.join(folder, name))]


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _answers(path: str) -> bool:
    try:
        connect(path).close()
    except OSError:
        return False
    return True
