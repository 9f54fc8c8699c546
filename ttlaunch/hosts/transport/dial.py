"""The byte stream to a host: TCP, a ProxyCommand, or a channel through a jump host."""

import contextlib
import errno
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

import paramiko

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.attempt import Attempt
from ttlaunch.hosts.transport.deadline import in_seconds, time_left
from ttlaunch.hosts.transport.ssh_config import HostSettings

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

KEEPALIVE_IDLE_S = 2
KEEPALIVE_PROBES = 3
UNANSWERED_MS = 6000
"""A host that has not acknowledged a byte, or a probe, for so long is lost."""

_SHOWN = 80
_DROPPED = (b"Exceeded MaxStartups",)
_NO_ROUTE = {
    errno.EHOSTUNREACH: "no route to host",
    errno.ENETUNREACH: "network is unreachable",
    errno.ECONNREFUSED: "connection refused",
    errno.EACCES: "a firewall on this machine forbids the connection",
    errno.EPERM: "a firewall on this machine forbids the connection",
}


def dial(settings: HostSettings, attempt: Attempt) -> socket.socket:
    """A stream on which the host has begun to speak SSH; hosts that drop a burst of connections are tried again.

    Raises:
        HostError: UNKNOWN_NAME, UNREACHABLE or SILENT.
    """
    tries, opening = 0, b""
    while True:
        attempt.phase = "name"
        tries += 1
        stream = _through_command(settings, attempt) if settings.proxy_command else _over_tcp(settings, attempt)
        attempt.phase = "banner"
        try:
            opening = _first_bytes(stream, attempt)
        except ConnectionError:
            opening = b""
        if opening and not opening.startswith(_DROPPED):
            return _speaking(stream, opening, settings)
        attempt.release(stream)
        pause_s = random.uniform(0.05, 0.2) * min(tries, 5)  # noqa: S311 - only spreads the load
        if settings.proxy_command or time_left(attempt.end) < pause_s:
            raise _hangs_up(settings, attempt, tries, opening)
        time.sleep(pause_s)


def through_jump(settings: HostSettings, jump: paramiko.Transport, via: str, attempt: Attempt) -> paramiko.Channel:
    """A channel of the connection to a jump host that leads to the host's port.

    Raises:
        HostError: UNREACHABLE, if the jump host cannot connect to it.
    """
    attempt.phase = "tcp"
    place = (settings.host_name, settings.port)
    try:
        return jump.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=time_left(attempt.end))
    except paramiko.ChannelException as error:
        raise HostError(
            settings.name,
            Trouble.UNREACHABLE,
            f"jump host {via} cannot connect to {settings.host_name} port {settings.port}: {error.text.lower()}",
            hints=(settings.try_by_hand(),),
        ) from error


def _over_tcp(settings: HostSettings, attempt: Attempt) -> socket.socket:
    try:
        found = socket.getaddrinfo(settings.host_name, settings.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        again = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        raise HostError(
            settings.name,
            Trouble.UNKNOWN_NAME,
            f"no address for `{settings.host_name}`" + (": the name server does not answer" if again else ""),
            hints=(f"`getent hosts {settings.host_name}` must print an address",),
        ) from error
    attempt.phase = "tcp"
    reason = ""
    for left, (family, kind, protocol, _, place) in zip(range(len(found), 0, -1), found, strict=True):
        stream = HostSocket(family, kind, protocol)
        attempt.hold(stream)
        stream.settimeout(max(0.05, time_left(attempt.end) / left))
        try:
            stream.connect(place)
        except TimeoutError:
            reason = reason or f"no answer on port {settings.port} within {in_seconds(attempt.timeout_s)}"
            attempt.release(stream)
        except OSError as error:
            words = _NO_ROUTE.get(error.errno or 0, (error.strerror or str(error)).lower())
            reason = f"{words} on port {settings.port}" if error.errno == errno.ECONNREFUSED else words
            attempt.release(stream)
        else:
            _notice_loss(stream)
            return stream
    raise HostError(settings.name, Trouble.UNREACHABLE, reason, hints=(settings.try_by_hand(),))


class HostSocket(socket.socket):
    """A TCP connection to a host.

    It acknowledges at once, as sshd keeps a small packet back until the one before is acknowledged, up to 40 ms later.
    And it keeps "no answer" from the kernel apart from "nothing yet", which Python gives the same type.

    Attributes:
        unanswered: The kernel has given the host up.
    """

    unanswered = False

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        with self._told_apart():
            data = super().recv(size, flags)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data

    def send(self, data: "ReadableBuffer", flags: int = 0, /) -> int:
        with self._told_apart():
            return super().send(data, flags)

    @contextlib.contextmanager
    def _told_apart(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            if error.errno != errno.ETIMEDOUT:
                raise
            self.unanswered = True
            raise ConnectionAbortedError(errno.ETIMEDOUT, error.strerror) from error


def _notice_loss(stream: socket.socket) -> None:
    """Let the kernel end a connection whose other end has vanished, whether it is idle or in the middle of data."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)


def _through_command(settings: HostSettings, attempt: Attempt) -> socket.socket:
    """A ProxyCommand as ssh runs it: by a shell, with the connection as its standard input and output."""
    assert settings.proxy_command is not None  # noqa: S101 - the caller looked
    ours, its = socket.socketpair()
    said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
    with its:
        child = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {settings.proxy_command}"],
            stdin=its.fileno(),
            stdout=its.fileno(),
            stderr=said,
            start_new_session=True,
        )
    proxy = _Proxy(child, said, settings.proxy_command)
    attempt.hold(proxy)
    attempt.hold(ours)
    attempt.proxy = proxy
    return ours


class _Proxy:
    """The process of a ProxyCommand."""

    def __init__(self, child: "subprocess.Popen[bytes]", said: IO[bytes], command: str) -> None:
        self._child = child
        self._said = said
        self.command = command

    def close(self) -> None:
        """End it and take its status, so that no zombie stays."""
        with contextlib.suppress(OSError):
            self._child.kill()
        self._child.wait()
        self._said.close()

    def stderr_tail(self) -> str:
        """Why it ended, if it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(0.2)
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        ended = f"it exited with status {self._child.returncode}" if self._child.returncode is not None else ""
        return ": ".join(part for part in (ended, lines[-1][:_SHOWN] if lines else "") if part)


def _first_bytes(stream: socket.socket, attempt: Attempt) -> bytes:
    """What the host says first, left in the stream; nothing if it hangs up."""
    stream.settimeout(max(0.01, time_left(attempt.end)))
    return stream.recv(_SHOWN, socket.MSG_PEEK)


def _speaking(stream: socket.socket, first: bytes, settings: HostSettings) -> socket.socket:
    if first.startswith((b"HTTP/", b"220 ", b"Not allowed")):
        words = first.splitlines()[0].decode("ascii", "replace")
        raise HostError(
            settings.name,
            Trouble.SILENT,
            f"speaks no SSH on port {settings.port}: it says `{words}`",
            hints=(settings.try_by_hand(),),
        )
    return stream


def _hangs_up(settings: HostSettings, attempt: Attempt, tries: int, words: bytes) -> HostError:
    if attempt.proxy is not None:
        reason = attempt.proxy.stderr_tail()
        return HostError(
            settings.name,
            Trouble.UNREACHABLE,
            f"ProxyCommand `{attempt.proxy.command[:_SHOWN]}` gives no connection" + (f": {reason}" if reason else ""),
            hints=(settings.try_by_hand(),),
        )
    said = f" but `{words.splitlines()[0].decode('ascii', 'replace')}`" if words else ""
    return HostError(
        settings.name,
        Trouble.SILENT,
        f"accepts connections on port {settings.port} and ends them before it says anything{said}",
        notes=(f"tried {tries} times within {in_seconds(attempt.timeout_s)}",),
        hints=("look at `MaxStartups` and the log of its sshd", settings.try_by_hand()),
    )
