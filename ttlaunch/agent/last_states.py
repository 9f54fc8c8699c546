"""List the states that workers of an elastic run have saved on this host, send one of them, or remove all.

A run that has lost its coordinator may still have workers here: they notice it only when the lease of their agent ends. The list
therefore waits until they have ended, up to a limit. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time

from ttlaunch import contract
from ttlaunch.agent.run_processes import run_processes

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any

_STEP = re.compile(r"step-([1-9][0-9]{0,17})(\.tmp)?")
_RECORD = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.json")
_LOOK_AGAIN_S = 0.2
_MOST = 1024  # states, or slots of states
_PIECE = 1024 * 1024


def main(arguments: dict[str, Any]) -> int:
    """Answer one question about the states of a run.

    Args:
        arguments: `remote_folder`: the folder of ttlaunch here, below the user's home unless it is absolute; `run_id`; `ask`: `list`,
            with `wait_s`, how long to wait for the run's processes; `send`, with `step` and `number`; or `remove`.

    Answers `list` with a frame `state` for each state, newest first, whose body is its record, then `listed`; `send` with frames `piece` and
    then `sent`; `remove` with `removed`. A file that cannot be read is a frame `unreadable` in place of all that would follow.
    """
    place = os.path.join(os.path.expanduser("~"), os.path.expanduser(arguments["remote_folder"]))
    folder = os.path.join(place, contract.RUNS_DIR, os.path.basename(arguments["run_id"]), contract.LAST_STATES_DIR)
    try:
        if arguments["ask"] == "list":
            _list(folder, arguments["run_id"], float(arguments["wait_s"]))
        elif arguments["ask"] == "send":
            _send(os.path.join(folder, f"step-{int(arguments['step'])}"), int(arguments["number"]))
        else:
            shutil.rmtree(folder, ignore_errors=True)
            contract.send_frame({"kind": "removed"})
    except OSError as error:
        contract.send_frame({"kind": "unreadable", "reason": f"{error.filename}: {error.strerror}"[:200]})
    return 0


def _list(folder: str, run_id: str, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while run_processes(run_id) and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
    unfinished, left = [], _MOST
    names = os.listdir(folder) if os.path.isdir(folder) else []
    for match in sorted(filter(None, map(_STEP.fullmatch, names)), key=lambda match: -int(match[1])):
        step = int(match[1])
        if match[2]:
            unfinished.append(step)
            continue
        for name in sorted(os.listdir(os.path.join(folder, match[0]))):
            found = _RECORD.fullmatch(name)
            if found and left:
                left -= 1
                with _open(os.path.join(folder, match[0], name)) as file:
                    contract.send_frame({"kind": "state", "step": step, "number": int(found[1])}, file.read())
    contract.send_frame({"kind": "listed", "unfinished": unfinished[:_MOST], "is_running": bool(run_processes(run_id))})


def _send(folder: str, number: int) -> None:
    with _open(os.path.join(folder, contract.shard_file(number))) as file:
        while piece := file.read(_PIECE):
            contract.send_frame({"kind": "piece"}, piece)
    contract.send_frame({"kind": "sent"})


def _open(path: str) -> Any:
    """Open a regular file; another one in its place is no reason to wait or to follow it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(22, "it is no regular file", path)
    return open(descriptor, "rb")
