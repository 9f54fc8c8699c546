"""Connects the launcher to the agent of a run, or to the head of a serving run: copies bytes between our standard streams and its socket.

It neither reads nor stores what it copies, so it may be killed with its connection at any time; the launcher then
starts another one. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading

from ttlaunch import contract
from ttlaunch.agent.claims import connect
from ttlaunch.agent.run_processes import is_stopped
from ttlaunch.agent.stop_marker import read_farewell

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any, NoReturn

_CHUNK = 64 * 1024
_GREETING_S = 1.0
_LOOK_S = 0.1


def main(arguments: dict[str, Any]) -> int:
    """Carry frames to and from the agent until either side ends; without an agent, send a frame `gone`.

    Args:
        arguments: `socket`: where the agent listens; `folder`: the run's folder; `agent`: the agent's process, if it is known.
            With `awaits`, somebody else listens there, perhaps not yet: only its words are passed on, and no frame of ours.
    """
    if arguments.get("awaits"):
        return _await(arguments["socket"])
    try:
        connection = connect(arguments["socket"])
    except OSError as error:
        reason = read_farewell(arguments["folder"]) or f"its agent is gone: {error.strerror or error}".lower()
        _write(1, contract.pack_frame({"kind": "gone", "reason": reason}))
        return 1
    # A live agent greets at once. The kernel accepts connections for a stopped one too, so its silence has to be explained.
    agent = arguments.get("agent")
    if not select.select([connection], [], [], _GREETING_S)[0] and agent and is_stopped(agent):
        _write(1, contract.pack_frame({"kind": "stopped", "pid": agent}))
        return 1
    return _carry(connection)


def _await(path: str) -> int:
    """Connect as soon as somebody listens, and carry what is said; end when standard input does, which nobody writes before."""
    while True:
        try:
            connection = connect(path)
        except OSError:
            if select.select([0], [], [], _LOOK_S)[0]:
                return 0
        else:
            return _carry(connection)


def _carry(connection: socket.socket) -> NoReturn:
    """Copy bytes both ways until either side ends, and with them this process."""
    threading.Thread(target=_copy_stdin, args=(connection,), daemon=True).start()
    with contextlib.suppress(OSError):
        while chunk := connection.recv(_CHUNK):
            _write(1, chunk)
    os._exit(0)  # the other thread waits for input, which may never come, and would keep the process alive


def _copy_stdin(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := os.read(0, _CHUNK):
            connection.sendall(chunk)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
