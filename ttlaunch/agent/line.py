"""One connection to an agent, with buffers in both directions, so that neither sending nor receiving ever waits.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket

from ttlaunch import contract

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_PART = 64 * 1024
_LARGEST = 1024 * 1024  # of one frame from a launcher


class Line:
    """A connection, with received bytes that are no complete frame yet, and bytes that wait to be sent."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        self.connection = connection
        self.is_open = True
        self._inbox = bytearray()
        self._outbox = bytearray()

    @property
    def is_idle(self) -> bool:
        return not self._outbox

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        self._outbox += contract.pack_frame(header, body)
        self.flush()

    def flush(self) -> None:
        try:
            while self._outbox and self.is_open:
                del self._outbox[: self.connection.send(self._outbox[:_PART])]
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def receive(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield the header and the body of the frames that have arrived completely.

        Raises:
            ValueError: If the bytes received are no frame.
        """
        try:
            part = self.connection.recv(_PART)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self.close()
        self._inbox += part
        while self.is_open and (frame := take_frame(self._inbox)) is not None:
            yield frame

    def close(self) -> None:
        self.is_open = False
        self.connection.close()


def take_frame(buffer: bytearray) -> tuple[dict[str, Any], bytes] | None:
    """Remove the first frame from a buffer and return it; None if it is not complete yet.

    Raises:
        ValueError: If the bytes are no frame, or more than any launcher sends in one.
    """
    stream = io.BytesIO(buffer)
    try:
        frame = contract.read_frame(stream.read)
    except EOFError:
        frame = None
    if frame is not None:
        del buffer[: stream.tell()]
    elif len(buffer) > _LARGEST:
        raise ValueError(f"not a frame: {bytes(buffer[:8])!r}")
    return frame


def listen(path: str) -> socket.socket:
    """Listen at a path; a socket that an earlier agent left there is removed."""
    forget(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    return listener


def forget(path: str) -> None:
    """Remove a socket file, if it exists."""
    with contextlib.suppress(OSError):
        os.unlink(path)
