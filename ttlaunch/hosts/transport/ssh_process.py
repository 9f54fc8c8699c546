"""A command on a host over one channel of an SSH connection."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.any_shell import AfterMark
from ttlaunch.hosts.transport.deadline import DaemonCaller, render_seconds, time_left
from ttlaunch.hosts.transport.quick_paramiko import paramiko
from ttlaunch.hosts.transport.transport import CHUNK, CONNECT_S, NO_ANSWER, NOT_READ, STILL_RUNNING, reporting_timeout

_KEPT_STDERR = 64 * 1024
_SLICE_S = 0.25
_PIECE = 32 * 1024
_SHOWN = 200
_MOMENT_S = 0.5


class SshProcess:
    """Reads and writes a channel without ever waiting longer than asked to.

    Args:
        host: The host's name, for error messages.
        channel: The channel on which the command was started.
        mark: The text that the command prints first, to show that it runs.
        why_lost: Returns why the connection was lost, as a clause.
    """

    def __init__(self, host: str, channel: paramiko.Channel, *, mark: str, why_lost: Callable[[], str]) -> None:
        self._host = host
        self._channel = channel
        self._why_lost = why_lost
        self._killed = False
        self._stdout, self._stderr = AfterMark(mark), AfterMark(mark)
        self._pending = b""
        self._reading = threading.Lock()
        self._stderr_tail = b""
        self._readable, self._stderr_readable = threading.Event(), threading.Event()
        channel.settimeout(_SLICE_S)
        channel.in_buffer.set_event(self._readable)
        channel.in_stderr_buffer.set_event(self._stderr_readable)
        self._writer = DaemonCaller()
        self._listener = threading.Thread(target=self._keep_stderr, daemon=True)
        self._listener.start()

    def write(self, data: bytes, *, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        try:
            with reporting_timeout(self._host, NOT_READ, timeout_s):
                self._writer.call(lambda: self._send(data, end), timeout_s=timeout_s)
        except (OSError, EOFError, paramiko.SSHException) as error:
            self._no_longer_reads(error)

    def close_stdin(self) -> None:
        with contextlib.suppress(TimeoutError, OSError, EOFError, paramiko.SSHException):
            self._writer.call(self._channel.shutdown_write, timeout_s=CONNECT_S)

    def read(self, most: int = CHUNK, *, timeout_s: float) -> bytes:
        end = time.monotonic() + timeout_s
        if not self._reading.acquire(timeout=timeout_s):
            raise self._no_answer(timeout_s)
        try:
            while not self._pending:
                data = self._receive(most, end, timeout_s)
                self._pending = self._stdout.feed(data)
                if not data:
                    self._end_of_output()
                    return b""
                if self._stdout.too_much:
                    raise self._answered_by_another()
            part, self._pending = self._pending[:most], self._pending[most:]
            return part
        finally:
            self._reading.release()

    def stderr(self) -> bytes:
        if self._channel.closed or self._channel.eof_received:
            self._listener.join(1.0)
        return self._stderr_tail if self._stderr.passed else self._stderr.noise[-_KEPT_STDERR:]

    def wait(self, *, timeout_s: float) -> int:
        if not self._channel.status_event.wait(timeout_s):
            raise HostError(self._host, Trouble.TIMED_OUT, f"{STILL_RUNNING} {render_seconds(timeout_s)}")
        name = getattr(self._channel, "exit_signal", None)
        if name is not None:
            return 128 + getattr(signal, f"SIG{name}", 0)
        if self._channel.exit_status == -1:
            raise HostError(self._host, Trouble.LOST, self._why_lost())
        return self._channel.exit_status

    def kill(self) -> None:
        # In a thread, since paramiko writes to the connection here, which blocks while the host takes nothing in.
        self._killed = True
        threading.Thread(target=self._close, daemon=True).start()

    def _send(self, data: bytes, end: float) -> None:
        view = memoryview(data)
        while view:
            try:
                sent = self._channel.send(bytes(view[:_PIECE]))
            except TimeoutError:
                if not time_left(end):
                    raise
                continue
            if not sent:
                raise EOFError
            view = view[sent:]

    def _receive(self, most: int, end: float, timeout_s: float) -> bytes:
        while self._readable.wait(time_left(end)):
            with contextlib.suppress(TimeoutError):
                return self._channel.recv(most)
        raise self._no_answer(timeout_s)

    def _no_answer(self, timeout_s: float) -> HostError:
        return HostError(self._host, Trouble.TIMED_OUT, f"{NO_ANSWER} {render_seconds(timeout_s)}")

    def _end_of_output(self) -> None:
        """Distinguish the end of a command's output from that of the connection, and from a greeting that never ran it."""
        if not self._channel.eof_received and not self._killed:
            raise HostError(self._host, Trouble.LOST, self._why_lost())
        if self._stdout.passed or self._killed:
            return
        if (
            self._stdout.noise.strip() or not self.stderr().strip()
        ):  # a shell that cannot read the command says so there
            raise self._answered_by_another()

    def _answered_by_another(self) -> HostError:
        """Return the error of a login shell, or a program in its place, that has ended without running the command."""
        lines = self._stdout.noise.decode("utf-8", "replace").strip().splitlines()
        how = f" and prints `{lines[0][:_SHOWN]}`" if lines else " and prints nothing"
        if not lines and self._channel.status_event.wait(_MOMENT_S) and self._channel.exit_status >= 0:
            how = f", ends with status {self._channel.exit_status} and prints nothing"
        return HostError(
            self._host,
            Trouble.SCRIPT,
            f"the login shell runs no commands{how}",
            hints=(
                (
                    "`getent passwd USER` on the host names the login shell: /bin/false and nologin run nothing; "
                    "`usermod --shell /bin/bash USER` sets another"
                ),
                "or look at `ForceCommand` of its sshd",
            ),
        )

    def _no_longer_reads(self, error: Exception) -> NoReturn:
        self._let_the_end_show()
        # The command has ended if the host closed the channel; if the channel closed with the connection, the host is lost.
        closed_here = self._killed or not self._channel.closed
        alive = closed_here or getattr(self._channel, "closed_by_host", False)
        if not alive or not self._channel.get_transport().is_active():
            raise HostError(self._host, Trouble.LOST, self._why_lost()) from error
        if not closed_here:
            with self._reading:  # what came before the channel closed shows whether the command ever ran
                while not self._stdout.passed and (data := self._channel.recv(CHUNK)):
                    self._pending += self._stdout.feed(data)
                if not self._stdout.passed:
                    raise self._answered_by_another() from error
        raise HostError(self._host, Trouble.LOST, "the command no longer reads its input") from error

    def _let_the_end_show(self) -> None:
        """Wait a moment for why a write failed: a channel may close, and fail, before all of its connection has."""
        end = time.monotonic() + _MOMENT_S
        while not self._killed and not getattr(self._channel, "closed_by_host", False) and time_left(end):
            if not self._channel.get_transport().is_active():
                return
            time.sleep(_MOMENT_S / 50)

    def _keep_stderr(self) -> None:
        while True:
            self._stderr_readable.wait()
            try:
                part = self._channel.recv_stderr(CHUNK)
            except TimeoutError:
                continue
            except (OSError, EOFError, paramiko.SSHException):
                return
            if not part:
                return
            if self._stderr.too_much:
                continue
            self._stderr_tail = (self._stderr_tail + self._stderr.feed(part))[-_KEPT_STDERR:]

    def _close(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()
