"""Joins the launcher's connection to the agent of a run: copies bytes between our standard streams and its socket.

It understands nothing of what it carries and keeps nothing, so it may be killed with its connection at any time; the
launcher makes another. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from ttlaunch import contract
from ttlaunch.agent.stop_marker import read_farewell

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from typing import Any

_PART = 64 * 1024


def main(arguments: dict[str, Any]) -> int:
    """Carry frames to and from the agent until either side ends; without an agent, send a frame `gone`.

    Args:
        arguments: `socket`: where the agent listens; `folder`: the run's folder.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(arguments["socket"])
    except OSError as error:
        reason = read_farewell(arguments["folder"]) or f"its agent is gone: {error.strerror or error}".lower()
        _write(1, contract.pack_frame({"kind": "gone", "reason": reason}))
        return 1
    threading.Thread(target=_carry_in, args=(connection,), daemon=True).start()
    with contextlib.suppress(OSError):
        while part := connection.recv(_PART):
            _write(1, part)
    os._exit(0)  # the other thread waits for input, which may never come, and would keep the process alive


def _carry_in(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := os.read(0, _PART):
            connection.sendall(part)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
