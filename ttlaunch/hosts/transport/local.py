"""This machine as a host: the same interface and deadlines as over SSH, without an sshd."""

import contextlib
import math
import os
import platform
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.deadline import render_seconds, time_left
from ttlaunch.hosts.transport.transport import CHUNK, CONNECT_S, NO_ANSWER, NOT_READ, STILL_RUNNING, reporting_timeout
from ttlaunch.system_reason import system_reason

_STDERR_TAIL_BYTES = 64 * 1024
_POLL_S = 0.25
_WAIT_AFTER_KILL_S = 1.0
_LAST_STDERR_S = 1.0
_LOCAL_NAMES = {"localhost", "localhost.localdomain", "ip6-localhost"}


def is_this_machine(host: str) -> bool:
    """Whether a name from a hostfile means this machine."""
    names = {socket.gethostname(), platform.node(), *_LOCAL_NAMES}
    return (
        host in names or host.split(".", 1)[0] in {name.split(".", 1)[0] for name in names} or host.startswith("127.")
    )


class LocalTransport:
    """Runs commands as children of this process, each in a session of its own."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.addresses = None
        self.bytes_per_s = math.inf
        self._lock = threading.Lock()
        self._processes: list[LocalProcess] = []

    def connect(self, *, timeout_s: float = CONNECT_S) -> None:
        """Do nothing: commands on this machine need no connection."""

    def start(self, command: str, *, timeout_s: float = CONNECT_S) -> "LocalProcess":  # noqa: ARG002 - starts at once
        try:
            child = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=Path.home(),
                start_new_session=True,
            )
        except (OSError, ValueError, RuntimeError) as error:  # home missing or unknown, or a NUL in the command
            raise HostError(
                self.host, Trouble.LOST, f"a command cannot be started: {system_reason(error).lower()}"
            ) from error
        process = LocalProcess(self.host, child)
        with self._lock:
            self._processes = [*(one for one in self._processes if not one.has_ended), process]
        return process

    def close(self) -> None:
        with self._lock:
            processes, self._processes = self._processes, []
        for process in processes:
            process.kill()


class LocalProcess:
    """A child of this process; its pipes never block longer than the deadline."""

    def __init__(self, host: str, child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None  # noqa: S101 - all three streams are pipes
        assert child.stdout is not None  # noqa: S101
        assert child.stderr is not None  # noqa: S101
        self._host = host
        self._child = child
        self._killed = threading.Event()
        self._stderr_tail = b""
        self._stdin, self._stdout = _Pipe(child.stdin, self._killed), _Pipe(child.stdout, self._killed)
        os.set_blocking(child.stdin.fileno(), False)
        self._stderr_reader = threading.Thread(target=self._read_stderr, args=(child.stderr,), daemon=True)
        self._stderr_reader.start()

    @property
    def has_ended(self) -> bool:
        """Whether the child has ended and all of its output was read, so that nothing is left to close."""
        return self._child.poll() is not None and self._stdin.closed and self._stdout.closed

    def write(self, data: bytes, *, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        view = memoryview(data)
        try:
            with reporting_timeout(self._host, NOT_READ, timeout_s), self._stdin.use(end) as descriptor:
                while view:
                    with contextlib.suppress(BlockingIOError):
                        view = view[os.write(descriptor, view[:CHUNK]) :]
                        continue
                    self._stdin.wait_for(select.POLLOUT, end)
        except (OSError, EOFError) as error:
            raise HostError(self._host, Trouble.LOST, "the command no longer reads its input") from error

    def close_stdin(self) -> None:
        self._stdin.close()

    def read(self, most: int = CHUNK, *, timeout_s: float) -> bytes:
        end = time.monotonic() + timeout_s
        try:
            with reporting_timeout(self._host, NO_ANSWER, timeout_s), self._stdout.use(end) as descriptor:
                self._stdout.wait_for(select.POLLIN, end)
                data = os.read(descriptor, most)
        except EOFError:
            return b""
        if not data:
            self._stdout.close()
        return data

    def stderr(self) -> bytes:
        # The kernel closes the pipes of a process that exits before its parent can learn of the end.
        if self._stdout.closed or self._child.poll() is not None:
            self._stderr_reader.join(_LAST_STDERR_S)
        return self._stderr_tail

    def wait(self, *, timeout_s: float) -> int:
        try:
            status = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise HostError(self._host, Trouble.TIMED_OUT, f"{STILL_RUNNING} {render_seconds(timeout_s)}") from error
        return 128 - status if status < 0 else status

    def kill(self) -> None:
        self._killed.set()
        if self._child.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._child.pid, signal.SIGKILL)  # its process group, which is not ours
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_WAIT_AFTER_KILL_S)
        self._stdin.close()
        self._stdout.close()

    def _read_stderr(self, stderr: IO[bytes]) -> None:
        pipe = _Pipe(stderr, self._killed)
        with contextlib.suppress(EOFError), pipe.use(float("inf")) as descriptor:
            while True:
                pipe.wait_for(select.POLLIN, float("inf"))
                part = os.read(descriptor, CHUNK)
                if not part:
                    break
                self._stderr_tail = (self._stderr_tail + part)[-_STDERR_TAIL_BYTES:]
        pipe.close()


class _Pipe:
    """Our end of a pipe, closed only while no thread uses it.

    A thread that polls or writes holds the descriptor's number. If another thread closed it at that moment, the system
    could give the number to another file, and the first thread would read or write there. So `close` only marks the
    pipe while it is in use, and the thread that uses it closes it afterwards.
    """

    def __init__(self, file: IO[bytes], killed: threading.Event) -> None:
        self._file = file
        self._killed = killed
        self._lock = threading.Lock()
        self._closing = False

    @property
    def closed(self) -> bool:
        return self._file.closed

    @contextlib.contextmanager
    def use(self, end: float) -> Iterator[int]:
        """Lend the descriptor to one thread at a time, until `end` on the monotonic clock.

        Raises:
            TimeoutError: If another thread still uses it at `end`.
            EOFError: If it is closed.
        """
        left = time_left(end)
        if not self._lock.acquire(timeout=left if left < threading.TIMEOUT_MAX else -1):
            raise TimeoutError
        try:
            if self._closing:
                raise EOFError
            yield self._file.fileno()
        finally:
            if self._closing:
                self._file.close()
            self._lock.release()

    def wait_for(self, event: int, end: float) -> None:
        """Wait until it can be used without blocking.

        Raises:
            TimeoutError: If it still cannot be used at `end`.
            EOFError: If the command has been killed, even if another process still holds the other end.
        """
        poll = select.poll()
        poll.register(self._file.fileno(), event)
        # Poll in short intervals, because neither `kill` nor `close` in another thread wakes a poll: a grandchild may still hold the
        # other end of the pipe, so killing the child need not close it.
        while not poll.poll(min(_POLL_S, time_left(end)) * 1000):
            if self._closing or self._killed.is_set():
                raise EOFError
            if not time_left(end):
                raise TimeoutError

    def close(self) -> None:
        """Close it now, or as soon as the thread that uses it has noticed."""
        self._closing = True
        if self._lock.acquire(blocking=False):
            try:
                self._file.close()
            finally:
                self._lock.release()
