"""This machine as a host: the same promises as over SSH, without an sshd."""

import contextlib
import os
import platform
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from ttlaunch.errors import HostError, Trouble
from ttlaunch.remote.transport import CHUNK, CONNECT_S

_KEPT_STDERR = 64 * 1024
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
        self._processes: list[LocalProcess] = []

    def connect(self, *, timeout_s: float = CONNECT_S) -> None:
        """This machine is always there."""

    def start(self, command: str, *, timeout_s: float = CONNECT_S) -> "LocalProcess":  # noqa: ARG002 - starts at once
        try:
            child = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=Path.home(),
                start_new_session=True,
            )
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise HostError(self.host, Trouble.LOST, f"a command cannot be started: {reason}") from error
        process = LocalProcess(self.host, child)
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            process.kill()


class LocalProcess:
    """A child of this process; its pipes never block longer than the deadline."""

    def __init__(self, host: str, child: subprocess.Popen[bytes]) -> None:
        self._host = host
        self._child = child
        self._stderr = b""
        self._reader = threading.Thread(target=self._keep_stderr, daemon=True)
        self._reader.start()
        assert child.stdin is not None  # noqa: S101 - all three streams are pipes
        assert child.stdout is not None  # noqa: S101
        self._stdin, self._stdout = child.stdin, child.stdout
        os.set_blocking(self._stdin.fileno(), False)

    def write(self, data: bytes, *, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin.fileno(), view[:CHUNK]) :]
            except BlockingIOError:
                self._wait_for(self._stdin.fileno(), select.POLLOUT, end)
            except (OSError, ValueError) as error:
                raise HostError(self._host, Trouble.LOST, "the command no longer reads its input") from error

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def read(self, most: int = CHUNK, *, timeout_s: float) -> bytes:
        self._wait_for(self._stdout.fileno(), select.POLLIN, time.monotonic() + timeout_s)
        return os.read(self._stdout.fileno(), most)

    def stderr(self) -> bytes:
        if self._child.poll() is not None:
            self._reader.join(1.0)
        return self._stderr

    def wait(self, *, timeout_s: float) -> int:
        try:
            status = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise HostError(self._host, Trouble.TIMED_OUT, f"a command goes on after {timeout_s:g} s") from error
        return 128 - status if status < 0 else status

    def kill(self) -> None:
        self.close_stdin()
        if self._child.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._child.pid, signal.SIGKILL)  # it leads a session of its own, so its id is not ours
            self._child.wait()

    def _wait_for(self, descriptor: int, event: int, end: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise HostError(self._host, Trouble.TIMED_OUT, "no answer from a command within its deadline")

    def _keep_stderr(self) -> None:
        assert self._child.stderr is not None  # noqa: S101 - it is a pipe
        while part := os.read(self._child.stderr.fileno(), CHUNK):
            self._stderr = (self._stderr + part)[-_KEPT_STDERR:]
