"""A host that exists only in memory: its programs are Python functions, and it breaks in the ways that hosts break.

For tests of everything that works through a `Transport`, in this project and in yours: no sshd, no process, no network.

    def greet(streams: Streams) -> int:
        streams.write(b"hello " + streams.read())
        return 0

    host = MemoryTransport("metal-01", {"greet": greet})
"""

import shlex
import threading
import time
from collections.abc import Callable, Mapping

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.deadline import render_seconds, time_left
from ttlaunch.hosts.transport.transport import (
    CHUNK,
    CONNECT_S,
    NO_ANSWER,
    NOT_READ,
    NOT_STARTED,
    STILL_RUNNING,
    reporting_timeout,
)
from ttlaunch.quick_dataclass import dataclass

_KEPT_STDERR = 64 * 1024
_NOT_FOUND = 127
_CAPACITY = 64 * 1024
_LONGEST_S = 3600.0


@dataclass(frozen=True)
class Faults:
    """The ways in which a host fails.

    Attributes:
        refuses: The error that `connect` raises.
        silent: The host accepts connections and sends nothing.
        slow_s: Seconds that pass before it accepts a connection, and before it starts a command.
        dies_after_bytes: The host vanishes once this many bytes have gone to and from its commands.
    """

    refuses: HostError | None = None
    silent: bool = False
    slow_s: float = 0.0
    dies_after_bytes: int | None = None


class Streams:
    """The arguments and the standard streams of a program.

    Attributes:
        arguments: The words of the command line after the program's name.
    """

    def __init__(self, process: "MemoryProcess", arguments: list[str]) -> None:
        self._process = process
        self.arguments = arguments

    def read(self, most: int | None = None) -> bytes:
        """Up to `most` bytes of standard input as soon as there are any; None reads to the end."""
        if most is not None:
            return self._process.stdin.read(most, deadline=float("inf"))
        parts = []
        while part := self._process.stdin.read(CHUNK, deadline=float("inf")):
            parts.append(part)
        return b"".join(parts)

    def write(self, data: bytes) -> None:
        """Print to standard output.

        Raises:
            BrokenPipeError: If the reader has closed its end.
        """
        self._process.stdout.write(data, deadline=float("inf"))

    def write_error(self, data: bytes) -> None:
        """Print to standard error, which never blocks."""
        self._process.complain(data)


Program = Callable[[Streams], int]
"""Takes its streams and returns its exit status."""


class MemoryTransport:
    """A host with the given programs.

    Args:
        host: Its name.
        programs: The host's programs by name. `start` splits a command line as a shell does, but expands nothing; the
            first word names the program.
        faults: How the host fails; None if it does not.
        addresses: The value of the property `addresses`: IP addresses of this machine and of the host, or None for no
            network between them.
    """

    def __init__(
        self,
        host: str,
        programs: Mapping[str, Program],
        *,
        faults: Faults | None = None,
        addresses: tuple[str, str] | None = None,
    ) -> None:
        self.host = host
        self.addresses = addresses
        self.bytes_per_s = None
        self._programs = programs
        self._faults = faults or Faults()
        self._lock = threading.Lock()
        self._bytes = 0
        self._dead = threading.Event()
        self._processes: list[MemoryProcess] = []

    def connect(self, *, timeout_s: float = CONNECT_S) -> None:
        within = f"within {render_seconds(timeout_s)}"
        if self._dead.is_set():
            raise HostError(self.host, Trouble.UNREACHABLE, f"no answer on port 22 {within}")
        if self._faults.refuses is not None:
            raise self._faults.refuses
        if self._faults.silent or self._faults.slow_s > timeout_s:
            self._dead.wait(timeout_s)
            raise HostError(self.host, Trouble.SILENT, f"accepts connections on port 22 and sends nothing {within}")
        self._dead.wait(self._faults.slow_s)

    def start(self, command: str, *, timeout_s: float = CONNECT_S) -> "MemoryProcess":
        if self._faults.slow_s > timeout_s:
            self._dead.wait(timeout_s)
            raise HostError(self.host, Trouble.TIMED_OUT, f"{NOT_STARTED} {render_seconds(timeout_s)}")
        self._dead.wait(self._faults.slow_s)
        if self._dead.is_set():
            raise HostError(self.host, Trouble.LOST, "the connection broke: the host hung up")
        name, *arguments = shlex.split(command)
        process = MemoryProcess(self.host, count=self._count)
        process.begin(self._programs.get(name, _not_found(name)), arguments)
        with self._lock:
            self._processes.append(process)
        return process

    def die(self) -> None:
        """Make the host unreachable for good and end everything that runs on it."""
        self._dead.set()
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            process.lose()

    def close(self) -> None:
        with self._lock:
            processes, self._processes = self._processes, []
        for process in processes:
            process.kill()

    def _count(self, transferred: int) -> None:
        with self._lock:
            self._bytes += transferred
            over = self._faults.dies_after_bytes is not None and self._bytes >= self._faults.dies_after_bytes
        if over:
            self.die()


class MemoryProcess:
    """A program in a thread of its own."""

    def __init__(self, host: str, *, count: Callable[[int], None]) -> None:
        self.stdin, self.stdout = MemoryPipe(), MemoryPipe()
        self._host = host
        self._count = count
        self._stderr_tail = b""
        self._status: int | None = None
        self._lost = False
        self._over = threading.Event()

    def begin(self, program: Program, arguments: list[str]) -> None:
        threading.Thread(target=self._run, args=(program, Streams(self, arguments)), daemon=True).start()

    def write(self, data: bytes, *, timeout_s: float) -> None:
        try:
            self._raise_if_lost()
            with reporting_timeout(self._host, NOT_READ, timeout_s):
                self.stdin.write(data, deadline=time.monotonic() + timeout_s)
            self._count(len(data))
            self._raise_if_lost()
        except BrokenPipeError as error:
            self._raise_if_lost()
            raise HostError(self._host, Trouble.LOST, "the command no longer reads its input") from error

    def close_stdin(self) -> None:
        self.stdin.close()

    def read(self, most: int = CHUNK, *, timeout_s: float) -> bytes:
        with reporting_timeout(self._host, NO_ANSWER, timeout_s):
            data = self.stdout.read(most, deadline=time.monotonic() + timeout_s)
        self._raise_if_lost()
        self._count(len(data))
        return data

    def stderr(self) -> bytes:
        return self._stderr_tail

    def wait(self, *, timeout_s: float) -> int:
        if not self._over.wait(timeout_s):
            raise HostError(self._host, Trouble.TIMED_OUT, f"{STILL_RUNNING} {render_seconds(timeout_s)}")
        if self._status is None:
            self._raise_if_lost()
            raise HostError(self._host, Trouble.LOST, "the command has been ended")
        return self._status

    def kill(self) -> None:
        """End the streams: the program's next read finds the end, and its next write raises `BrokenPipeError`."""
        self._over.set()
        self.stdin.close()
        self.stdin.stop_reading()
        self.stdout.stop_reading()
        self.stdout.close()

    def lose(self) -> None:
        """End the program because its host has vanished."""
        self._lost = self._lost or self._status is None
        self.kill()

    def complain(self, data: bytes) -> None:
        self._stderr_tail = (self._stderr_tail + data)[-_KEPT_STDERR:]

    def _run(self, program: Program, streams: Streams) -> None:
        try:
            status = program(streams)
        except BrokenPipeError:
            status = 1
        except Exception as error:  # noqa: BLE001 - an uncaught exception ends the program with status 1, as in a process
            self.complain(f"{type(error).__name__}: {error}\n".encode())
            status = 1
        if not self._over.is_set():  # a command that was killed, or whose host vanished, has no status
            self._status = status
        self.stdin.stop_reading()
        self.stdout.close()
        self._over.set()

    def _raise_if_lost(self) -> None:
        if self._lost:
            raise HostError(self._host, Trouble.LOST, "the connection broke: the host hung up")


def _not_found(name: str) -> Program:
    def complain(streams: Streams) -> int:
        streams.write_error(f"sh: {name}: not found\n".encode())
        return _NOT_FOUND

    return complain


class MemoryPipe:
    """Bytes from one thread to another, through a buffer that is bounded like a real pipe's; both ends have deadlines."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._content = bytearray()
        self._closed = False
        self._abandoned = False

    def write(self, data: bytes, *, deadline: float) -> None:
        """Write all of `data`, waiting while the buffer is full.

        Raises:
            TimeoutError: If not all of it fitted by `deadline`, a time of the monotonic clock.
            BrokenPipeError: If the reader has closed its end.
        """
        view = memoryview(data)
        with self._changed:
            while view:
                self._wait_until(lambda: self._abandoned or self._closed or len(self._content) < _CAPACITY, deadline)
                if self._abandoned or self._closed:
                    raise BrokenPipeError
                room = _CAPACITY - len(self._content)
                self._content += view[:room]
                view = view[room:]
                self._changed.notify_all()

    def read(self, most: int, *, deadline: float) -> bytes:
        """Return up to `most` bytes as soon as there are any, and `b""` at the end of the data.

        Raises:
            TimeoutError: If no byte came by `deadline`.
        """
        with self._changed:
            self._wait_until(lambda: bool(self._content) or self._closed or self._abandoned, deadline)
            part = bytes(self._content[:most])
            del self._content[:most]
            self._changed.notify_all()
            return part

    def close(self) -> None:
        """Close the writing end; the reader gets what is left and then the end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop_reading(self) -> None:
        """Close the reading end; what is in the buffer is dropped, and writing raises `BrokenPipeError`."""
        with self._changed:
            self._abandoned = True
            self._content.clear()
            self._changed.notify_all()

    def _wait_until(self, true: Callable[[], bool], deadline: float) -> None:
        while not true():
            if not time_left(deadline):
                raise TimeoutError
            self._changed.wait(min(time_left(deadline), _LONGEST_S))
