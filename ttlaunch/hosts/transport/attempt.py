"""One attempt to connect to a host: its current phase, and what to close if it is given up."""

import contextlib
import socket
import subprocess
import threading
import time
from typing import IO, Protocol

_SHOWN = 80


class Closable(Protocol):
    def close(self) -> object: ...


class Proxy:
    """The process of a ProxyCommand."""

    def __init__(self, child: "subprocess.Popen[bytes]", stderr: IO[bytes], command: str) -> None:
        self._child = child
        self._stderr = stderr
        self.command = command

    def close(self) -> None:
        """Kill the process and wait for it, so that no zombie stays."""
        with contextlib.suppress(OSError):
            self._child.kill()
        self._child.wait()
        self._stderr.close()

    def stderr_tail(self) -> str:
        """Its exit status and the last line of its standard error; empty for what is not known."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(0.2)
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        ended = f"it exited with status {self._child.returncode}" if self._child.returncode is not None else ""
        return ": ".join(part for part in (ended, lines[-1][:_SHOWN] if lines else "") if part)


class Attempt:
    """The state shared by the thread that connects and the thread that waits for it.

    Attributes:
        phase: `settings`, `name`, `tcp`, `banner`, `keys`, `login`, in this order.
        timeout_s: The time allowed for the whole attempt.
        end: The attempt's deadline on the monotonic clock.
        via: The jump host that the attempt is connecting to; empty once it connects to the host itself.
        proxy: The ProxyCommand, if there is one.
        kept: Whether the connection succeeded.
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
        """Close `thing` if the attempt fails.

        Raises:
            TimeoutError: If the attempt has been given up already; `thing` is closed then.
        """
        with self._lock:
            if not self._over:
                self._held.append(thing)
                return
        thing.close()
        raise TimeoutError

    def release(self, thing: Closable) -> None:
        """Close `thing` now: this connection did not lead to the host."""
        with self._lock:
            self._held = [held for held in self._held if held is not thing]
        thing.close()

    def keep(self) -> list[Closable]:
        """Mark the attempt as successful and hand over everything to close in the end, in the order of opening.

        Raises:
            TimeoutError: If the waiting thread has given up meanwhile; it has closed everything.
        """
        with self._lock:  # `give_up` may run in the other thread at this moment: exactly one of the two gets the list
            if self._over:
                raise TimeoutError
            self.kept = True
            held, self._held = self._held, []
        return held

    def give_up(self) -> None:
        """Close everything, which wakes the thread that still waits on one of the sockets."""
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
