"""A pipe in memory, for the streams of a host in memory: bounded like a real one, with deadlines on both ends."""

import threading
from collections.abc import Callable

from ttlaunch.hosts.transport.deadline import time_left

_CAPACITY = 64 * 1024
_LONGEST_S = 3600.0


class MemoryPipe:
    """Bytes from one thread to another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._content = bytearray()
        self._closed = False
        self._abandoned = False

    def write(self, data: bytes, *, end: float) -> None:
        """Put all of `data` in, as fast as it is taken out.

        Raises:
            TimeoutError: If it is not all in when `end` has come.
            BrokenPipeError: If nobody will take it out.
        """
        view = memoryview(data)
        with self._changed:
            while view:
                self._wait_until(lambda: self._abandoned or self._closed or len(self._content) < _CAPACITY, end)
                if self._abandoned or self._closed:
                    raise BrokenPipeError
                room = _CAPACITY - len(self._content)
                self._content += view[:room]
                view = view[room:]
                self._changed.notify_all()

    def read(self, most: int, *, end: float) -> bytes:
        """Take up to `most` bytes as soon as there are any; none at the end.

        Raises:
            TimeoutError: If none have come when `end` has.
        """
        with self._changed:
            self._wait_until(lambda: bool(self._content) or self._closed or self._abandoned, end)
            part = bytes(self._content[:most])
            del self._content[:most]
            self._changed.notify_all()
            return part

    def close(self) -> None:
        """Nothing more will be put in."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop_reading(self) -> None:
        """Nothing more will be taken out."""
        with self._changed:
            self._abandoned = True
            self._content.clear()
            self._changed.notify_all()

    def _wait_until(self, true: Callable[[], bool], end: float) -> None:
        while not true():
            if not time_left(end):
                raise TimeoutError
            self._changed.wait(min(time_left(end), _LONGEST_S))
