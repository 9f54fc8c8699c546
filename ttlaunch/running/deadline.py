"""Read from a socket until a deadline that holds for all reads together, so that a slow peer cannot hold a thread for ever."""

import io
import socket
import time
from typing import Any


class DeadlineReader(io.RawIOBase):
    """The stream of what a socket receives.

    Attributes:
        deadline: When reading ends with `TimeoutError`, on the monotonic clock.
    """

    def __init__(self, connection: socket.socket, deadline: float = 0.0) -> None:
        self._connection = connection
        self.deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)
