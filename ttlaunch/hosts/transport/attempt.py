"""One attempt to connect to a host: how far it has come, and what to close if it is given up."""

import contextlib
import socket
import threading
import time
from typing import Protocol


class Closable(Protocol):
    def close(self) -> object: ...


class Proxy(Closable, Protocol):
    """A process through which a connection goes."""

    command: str

    def stderr_tail(self) -> str: ...


class Attempt:
    """Shared between the thread that connects and the one that waits for it.

    Attributes:
        phase: `settings`, `name`, `tcp`, `banner`, `keys`, `login`, in this order.
        timeout_s: How long it may take altogether.
        end: When that time is over, on the monotonic clock.
        via: Name of the jump host that it is at, empty at the host itself.
        proxy: The ProxyCommand, if there is one.
        kept: It has come through.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.phase = "settings"
        self.timeout_s = timeout_s
        self.end = time.monotonic() + timeout_s
        self.via = ""
        self.proxy: Proxy | None = None
        self.kept = False
        self._lock = threading.Lock()
        self._held: list[Closable] = []
        self._over = False

    def limit(self, seconds: float | None) -> None:
        """Allow no more than so many seconds from now."""
        if seconds is not None and time.monotonic() + seconds < self.end:
            self.timeout_s = seconds
            self.end = time.monotonic() + seconds

    def hold(self, thing: Closable) -> None:
        """Close `thing` if the attempt comes to nothing."""
        with self._lock:
            if not self._over:
                self._held.append(thing)
                return
        thing.close()
        raise TimeoutError

    def release(self, thing: Closable) -> None:
        """Close `thing` now: this way did not lead to the host."""
        with self._lock:
            self._held = [held for held in self._held if held is not thing]
        thing.close()

    def keep(self) -> list[Closable]:
        """The attempt has come through: everything to close in the end, in the order in which it was opened."""
        with self._lock:
            if self._over:
                raise TimeoutError
            self.kept = True
            held, self._held = self._held, []
        return held

    def give_up(self) -> None:
        """Close everything; whoever still waits on it is woken."""
        with self._lock:
            self._over = True
            held, self._held = self._held, []
        close_all(held)


def close_all(things: list[Closable]) -> None:
    """Close what was opened, last opened first; never raises."""
    for thing in reversed(things):
        if isinstance(thing, socket.socket):
            with contextlib.suppress(OSError):
                thing.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on it, which `close` does not
        with contextlib.suppress(Exception):
            thing.close()
