"""A process of its own for a run, in a session of its own: no Ctrl-Z and no closed terminal of whoever watches reaches it.

The two hold a line. Over it the supervisor says which run it has begun, and whoever watches may say that it leaves the
supervisor to itself. A watcher that vanishes without a word was killed, and the run is ended as by SIGTERM.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttlaunch import contract
from ttlaunch.running.runs.launcher import Launcher

_PIECE = 65536
_FREE = b"free\n"


class Line:
    """The supervisor's end of the line."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, **values: Any) -> None:
        """Say something to whoever watches; nobody need listen."""
        with contextlib.suppress(OSError):
            self._end.sendall(json.dumps(values).encode() + b"\n")

    def _listen(self) -> None:
        """Wait for the other end to vanish, and end the run then, unless we were left to ourselves."""
        heard = b""
        with contextlib.suppress(OSError):
            while piece := self._end.recv(_PIECE):
                heard += piece
        if _FREE not in heard:
            os.kill(os.getpid(), signal.SIGTERM)


class Session:
    """The watcher's end: a supervisor that was started from here.

    Attributes:
        said: Everything that it has said so far.
        is_over: Whether it has ended, as far as `wait` has seen.
    """

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self.said: list[dict[str, Any]] = []
        self.is_over = False
        self._end = end
        self._rest = b""
        self._status: int | None = None

    def wait(self, timeout_s: float) -> None:
        """Wait for a time, or until the supervisor says something or ends."""
        if self.is_over or not select.select([self._end], [], [], timeout_s)[0]:
            return
        try:
            data = self._end.recv(_PIECE)
        except OSError:
            data = b""
        self.is_over = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        records = [contract.read_record(line) for line in lines]
        self.said += [record for record in records if record is not None]

    def signal(self, number: int) -> None:
        """Send the supervisor a signal, if it is still there, and let it run on if it was stopped so that it sees it."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
                os.kill(self.pid, signal.SIGCONT)

    def set_free(self) -> None:
        """Leave the supervisor to itself: it goes on when we end."""
        with contextlib.suppress(OSError):
            self._end.sendall(_FREE)

    def exit_status(self) -> int:
        """The supervisor's exit status, or minus the signal that killed it; waits for its end."""
        if self._status is None:
            _, wait_status = os.waitpid(self.pid, 0)
            self._end.close()
            self.is_over = True
            self._status = os.waitstatus_to_exitcode(wait_status)
        return self._status


class Attached:
    """A supervisor that was started by another process, as whoever attaches to its run sees it."""

    said: Sequence[dict[str, Any]] = ()

    def __init__(self, launcher: Launcher | None) -> None:
        self._launcher = launcher

    @property
    def is_over(self) -> bool:
        return self._launcher is None or not self._launcher.is_alive

    def wait(self, timeout_s: float) -> None:
        if not self.is_over:
            time.sleep(timeout_s)

    def signal(self, number: int) -> None:
        if self._launcher is not None:
            self._launcher.signal(number)

    def set_free(self) -> None:
        """It is."""

    def exit_status(self) -> int | None:
        """Its parent alone knows it."""
        return None


def start_session(work: Callable[[Line], int]) -> Session:
    """Do work in a process of its own, whose exit status is what the work returns; nothing of it comes back here.

    Raises:
        OSError: The system has no room for another process.
    """
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return Session(pid, ours)
    status = contract.STATUS_RANK_FAILED
    try:
        ours.close()
        os.setsid()
        status = work(Line(theirs))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def leave_terminal(places: Mapping[str, str]) -> None:
    """Print into files from now on and read nothing: the terminal may close.

    Args:
        places: The file for `stdout` and the one for `stderr`.

    Raises:
        OSError: One cannot be written.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        descriptor = os.open(places[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
        setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
