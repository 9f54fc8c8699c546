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

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.attempt import Attempt, Proxy
from ttlaunch.hosts.transport.deadline import render_seconds, time_left
from ttlaunch.hosts.transport.quick_paramiko import paramiko
from ttlaunch.hosts.transport.ssh_config import HostSettings
from ttlaunch.system_reason import system_reason

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
    """Return a stream on which the host has begun to speak SSH.

    An sshd at its `MaxStartups` limit drops connections at random, so a host that hangs up is tried again until the
    attempt's deadline.

    Raises:
        HostError: UNKNOWN_NAME, UNREACHABLE or SILENT.
    """
    tries, first = 0, b""
    while True:
        attempt.phase = "name"
        tries += 1
        stream = _through_command(settings, attempt) if settings.proxy_command else _over_tcp(settings, attempt)
        attempt.phase = "banner"
        try:
            first = _first_bytes(stream, attempt)
        except ConnectionError:
            first = b""
        if first and not first.startswith(_DROPPED):
            return _speaking(stream, first, settings)
        attempt.release(stream)
        pause_s = random.uniform(0.05, 0.2) * min(tries, 5)  # noqa: S311 - only spreads the load
        if settings.proxy_command or time_left(attempt.end) < pause_s:
            raise _hangs_up(settings, attempt, tries=tries, first=first)
        time.sleep(pause_s)


def through_jump(settings: HostSettings, attempt: Attempt, *, jump: paramiko.Transport, via: str) -> paramiko.Channel:
    """Open a channel through the connection to a jump host, named `via`, to the host's port.

    Raises:
        HostError: UNREACHABLE, if the jump host cannot connect to it.
    """
    attempt.phase = "tcp"
    place = (settings.host_name, settings.port)
    try:
        return jump.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=time_left(attempt.end))
    except paramiko.ChannelException as error:
        place_text = f"{settings.host_name} port {settings.port}: {error.text.lower()}"
        raise settings.error(Trouble.UNREACHABLE, f"jump host {via} cannot connect to {place_text}") from error


def _over_tcp(settings: HostSettings, attempt: Attempt) -> socket.socket:
    try:
        found = socket.getaddrinfo(settings.host_name, settings.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        again = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        reason = f"no address for `{settings.host_name}`" + (": the name server does not answer" if again else "")
        hints = (f"`getent hosts {settings.host_name}` must print an address",)
        raise settings.error(Trouble.UNKNOWN_NAME, reason, hints=hints, by_hand=False) from error
    attempt.phase = "tcp"
    reason = ""
    for left, (family, kind, protocol, _, place) in zip(range(len(found), 0, -1), found, strict=True):
        stream = HostSocket(family, kind, protocol)
        attempt.hold(stream)
        # Each address gets an equal share of what is left, so that a dead IPv6 address leaves time for IPv4.
        stream.settimeout(max(0.05, time_left(attempt.end) / left))
        try:
            stream.connect(place)
        except TimeoutError:
            reason = reason or f"no answer on port {settings.port} within {render_seconds(attempt.timeout_s)}"
            attempt.release(stream)
        except OSError as error:
            why = _NO_ROUTE.get(error.errno or 0, system_reason(error))
            reason = f"{why} on port {settings.port}" if error.errno == errno.ECONNREFUSED else why
            attempt.release(stream)
        else:
            _notice_loss(stream)
            return stream
    raise settings.error(Trouble.UNREACHABLE, reason)


class HostSocket(socket.socket):
    """A TCP connection to a host that acknowledges each packet at once and notices when the kernel gives the host up.

    sshd holds a small packet back until the previous one is acknowledged, which the kernel would do up to 40 ms later.
    Python raises `TimeoutError` both when the kernel has given the peer up and when no data has come within the
    socket's own timeout; this class turns the former into a `ConnectionAbortedError`.

    Attributes:
        unanswered: Whether the kernel has given the host up.
    """

    unanswered = False

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        with self._apart_from_timeouts():
            data = super().recv(size, flags)
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # the kernel resets it, so after every receive
        return data

    def send(self, data: "ReadableBuffer", flags: int = 0, /) -> int:
        with self._apart_from_timeouts():
            return super().send(data, flags)

    @contextlib.contextmanager
    def _apart_from_timeouts(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            if error.errno != errno.ETIMEDOUT:
                raise
            self.unanswered = True
            raise ConnectionAbortedError(errno.ETIMEDOUT, error.strerror) from error


def _notice_loss(stream: socket.socket) -> None:
    """Let the kernel end a connection whose other end has vanished.

    Keepalive probes cover an idle connection; `TCP_USER_TIMEOUT` covers one with unacknowledged data, on which the
    kernel sends no probes.
    """
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
    stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
    with its:
        child = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {settings.proxy_command}"],
            stdin=its.fileno(),
            stdout=its.fileno(),
            stderr=stderr,
            start_new_session=True,
        )
    proxy = Proxy(child, stderr, settings.proxy_command)
    attempt.hold(proxy)
    attempt.hold(ours)
    attempt.proxy = proxy
    return ours


def _first_bytes(stream: socket.socket, attempt: Attempt) -> bytes:
    """The first bytes that the host sends, left in the stream for paramiko to read; empty if the host hangs up."""
    stream.settimeout(max(0.01, time_left(attempt.end)))
    return stream.recv(_SHOWN, socket.MSG_PEEK)


def _speaking(stream: socket.socket, first: bytes, settings: HostSettings) -> socket.socket:
    if first.startswith((b"HTTP/", b"220 ", b"Not allowed")):
        line = first.splitlines()[0].decode("ascii", "replace")
        raise settings.error(Trouble.SILENT, f"is not an SSH server on port {settings.port}: it sends `{line}`")
    return stream


def _hangs_up(settings: HostSettings, attempt: Attempt, *, tries: int, first: bytes) -> HostError:
    if attempt.proxy is not None:
        reason = attempt.proxy.stderr_tail()
        command = f"ProxyCommand `{attempt.proxy.command[:_SHOWN]}`"
        return settings.error(Trouble.UNREACHABLE, f"{command} gives no connection" + (f": {reason}" if reason else ""))
    but = f" but `{first.splitlines()[0].decode('ascii', 'replace')}`" if first else ""
    return settings.error(
        Trouble.SILENT,
        f"accepts connections on port {settings.port} and closes them without an answer{but}",
        notes=(f"tried {tries} times within {render_seconds(attempt.timeout_s)}",),
        hints=("look at `MaxStartups` and the log of its sshd",),
    )
