"""The interface of every transport to a host: connect once, then run any number of commands at the same time.

Each call has a deadline, so that a host which stops answering is noticed and never waited for. Everything that goes
wrong is a `HostError`; the caller judges a command's exit status.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.deadline import render_seconds, time_left
from ttlaunch.quick_dataclass import dataclass

CHUNK = 65536
NOT_STARTED = "it has not started a command within"
NOT_READ = "a command has not read its input within"
NO_ANSWER = "no answer from a command within"
STILL_RUNNING = "a command is still running after"
"""How every transport begins the report of a missed deadline; the time follows."""

_SHOWN = 80
CONNECT_S = 5.0
"""How long a host may take from the first packet to a finished login."""


class Process(Protocol):
    """A command on a host, with its three standard streams."""

    def write(self, data: bytes, *, timeout_s: float) -> None:
        """Send all of `data` to its standard input.

        Raises:
            HostError: LOST if the command or the host no longer reads, TIMED_OUT if the data cannot be sent in time.
        """

    def close_stdin(self) -> None:
        """Close its standard input, so that it reads the end."""

    def read(self, most: int = CHUNK, *, timeout_s: float) -> bytes:
        """Up to `most` bytes of its standard output as soon as there are any; none at its end.

        Raises:
            HostError: LOST if the connection broke, TIMED_OUT if nothing came.
        """

    def stderr(self) -> bytes:
        """What it has written to its standard error so far, at most the last 64 KiB of it."""

    def wait(self, *, timeout_s: float) -> int:
        """Wait for the end of the command and return its exit status, or 128 + signal.

        Raises:
            HostError: LOST if the connection broke first, TIMED_OUT if the command still runs.
        """

    def kill(self) -> None:
        """Close the command's streams and end it as far as the transport can; never waits and never raises.

        Over SSH only the streams are closed. A command ends when it reads or writes them; only an agent can end others.
        """


class Transport(Protocol):
    """One host, as seen from here. Safe to use from several threads."""

    @property
    def host(self) -> str:
        """The host's name in the hostfile."""

    @property
    def addresses(self) -> tuple[str, str] | None:
        """The IP addresses of the connection, ours and the host's; None if no network is in between."""

    @property
    def bytes_per_s(self) -> float | None:
        """How fast the network to the host is, by the kernel's latest estimate; infinite without a network, None if unknown."""

    def connect(self, *, timeout_s: float = CONNECT_S) -> None:
        """Connect and log in; does nothing if that has been done.

        Raises:
            HostError: If the host cannot be used, for any reason; raised within the deadline.
        """

    def start(self, command: str, *, timeout_s: float = CONNECT_S) -> Process:
        """Start a command line of a POSIX shell, in the user's home folder, whatever the user's login shell is.

        Raises:
            HostError: LOST if the connection is gone, TIMED_OUT if the host does not start it.
        """

    def close(self) -> None:
        """End the connection and everything that runs through it; never raises."""


@contextlib.contextmanager
def reporting_timeout(host: str, clause: str, timeout_s: float) -> Iterator[None]:
    """Turn a `TimeoutError` of the block into a `HostError` whose evidence is the clause and the time that was allowed."""
    try:
        yield
    except TimeoutError as error:
        raise HostError(host, Trouble.TIMED_OUT, f"{clause} {render_seconds(timeout_s)}") from error


@dataclass(frozen=True)
class Completed:
    """A command that has ended."""

    status: int
    stdout: bytes
    stderr: bytes


def run(transport: Transport, command: str, *, stdin: bytes = b"", timeout_s: float) -> Completed:
    """Run a command to its end and return its output.

    Raises:
        HostError: For the reasons of `start`; TIMED_OUT if the command has not ended after `timeout_s` in all.
    """
    end = time.monotonic() + timeout_s
    process = transport.start(command, timeout_s=timeout_s)
    try:
        # A command may print before it has read everything, so both directions go on at the same time.
        threading.Thread(target=_feed, args=(process, stdin, end), daemon=True).start()
        parts = []
        while part := process.read(timeout_s=time_left(end)):
            parts.append(part)
        status = process.wait(timeout_s=time_left(end))
    except HostError as error:
        process.kill()
        if error.trouble is Trouble.TIMED_OUT:
            shown = command if len(command) <= _SHOWN else f"{command[:_SHOWN]}…"
            raise HostError(
                transport.host, Trouble.TIMED_OUT, f"`{shown}` has not ended within {render_seconds(timeout_s)}"
            ) from error
        raise
    return Completed(status, b"".join(parts), process.stderr())


def _feed(process: Process, stdin: bytes, end: float) -> None:
    """Write the command's standard input; a command that does not read all of it, such as `head`, has not failed."""
    with contextlib.suppress(HostError):
        if stdin:
            process.write(stdin, timeout_s=time_left(end))
        process.close_stdin()
