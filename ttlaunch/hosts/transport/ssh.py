"""A host over SSH: one connection, many commands on it at the same time, and a deadline on everything.

Built on paramiko, some of whose calls block for as long as a host likes; those calls run in daemon threads, and the
caller waits no longer than its deadline. Host keys and logins follow the rules of ssh:
see `ssh_config`, `known_hosts` and `login`.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.address import HostAddress
from ttlaunch.hosts.transport.any_shell import make_mark, wrap_command
from ttlaunch.hosts.transport.deadline import call_within, render_seconds, time_left
from ttlaunch.hosts.transport.key_ring import KeyRing
from ttlaunch.hosts.transport.quick_paramiko import paramiko
from ttlaunch.hosts.transport.ssh_config import SshFolders
from ttlaunch.hosts.transport.ssh_connection import Connection, open_connection
from ttlaunch.hosts.transport.ssh_process import SshProcess
from ttlaunch.hosts.transport.transport import CONNECT_S, NOT_STARTED, reporting_timeout


class SshTransport:
    """A host reached over SSH. Opens another connection when sshd accepts no more commands on the open ones.

    Args:
        address: What hostfile and cluster.yaml give; the rest comes from the user's ssh configuration.
        keys: Shared by all hosts, so that a key is read and unlocked once.
        folders: Where the ssh configuration, keys and known hosts lie.
    """

    def __init__(self, address: HostAddress, *, keys: KeyRing | None = None, folders: SshFolders | None = None) -> None:
        self.host = address.name
        self._address = address
        self._keys = keys or KeyRing()
        self._folders = folders or SshFolders()
        self._connections: list[Connection] = []
        self._connect_lock = threading.Lock()
        self._times_closed = 0

    @property
    def addresses(self) -> tuple[str, str] | None:
        return self._connections[0].addresses if self._connections else None

    @property
    def bytes_per_s(self) -> float | None:
        return self._connections[0].bytes_per_s if self._connections else None

    def connect(self, *, timeout_s: float = CONNECT_S) -> None:
        end = time.monotonic() + timeout_s
        with self._connect_alone(timeout_s):
            if self._connections and self._connections[0].alive:
                return
            self._forget()
            times_closed = self._times_closed
            self._keep(self._open(end), times_closed)

    def start(self, command: str, *, timeout_s: float = CONNECT_S) -> SshProcess:
        end = time.monotonic() + timeout_s
        if not self._connections:
            self.connect(timeout_s=timeout_s)
        mark = make_mark()
        with reporting_timeout(self.host, NOT_STARTED, timeout_s):
            connection, channel = call_within(
                lambda: self._run(wrap_command(command, mark=mark), end), timeout_s=time_left(end), on_late_result=_drop
            )
        return SshProcess(self.host, channel, mark=mark, why_lost=connection.why_lost)

    def close(self) -> None:
        self._times_closed += 1
        self._forget()

    def _open(self, end: float) -> Connection:
        return open_connection(self._address, keys=self._keys, folders=self._folders, timeout_s=time_left(end))

    def _keep(self, connection: Connection, times_closed: int) -> None:
        """Use a new connection from now on, unless `close` has been called since it was begun.

        It is added before `times_closed` is compared: a `close` in another thread either finds it in the list, or has
        raised the number that is compared here. Either way it gets closed.
        """
        self._connections = [*self._connections, connection]
        if times_closed != self._times_closed:
            self._forget()
            raise HostError(self.host, Trouble.LOST, "the connection has been closed")

    def _forget(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def _run(self, line: str, end: float) -> tuple[Connection, paramiko.Channel]:
        connection, channel = self._channel(end)
        try:
            channel.exec_command(line)
        except (OSError, EOFError, paramiko.SSHException) as error:
            if not connection.alive:
                raise HostError(self.host, Trouble.LOST, connection.why_lost()) from error
            channel.close()
            raise HostError(self.host, Trouble.LOGIN, "accepts the login but runs no command") from error
        return connection, channel

    def _channel(self, end: float) -> tuple[Connection, paramiko.Channel]:
        """Open a channel on a connection that has room for one."""
        main = next(iter(self._connections), None)
        if main is None:
            raise HostError(self.host, Trouble.LOST, "the connection has been closed")
        if not main.alive:
            raise HostError(self.host, Trouble.LOST, main.why_lost())
        tried: list[Connection] = []
        while True:
            for connection in [one for one in self._connections if one not in tried]:
                tried.append(connection)
                channel = connection.open_channel(timeout_s=time_left(end))
                if channel is not None:
                    return connection, channel
            if not main.alive:
                raise HostError(self.host, Trouble.LOST, main.why_lost())
            if not time_left(end):
                raise TimeoutError  # the host does not answer; another connection would not help
            # Every connection is full. Several threads may be here at once: the first one opens another connection, and
            # the others, which waited for it, look whether that one has room before they open one more.
            with self._connect_alone(time_left(end)):
                if all(connection in tried for connection in self._connections):
                    return self._another(end)

    def _another(self, end: float) -> tuple[Connection, paramiko.Channel]:
        """Open a channel on a new connection, which other threads see only once the channel is open."""
        times_closed = self._times_closed
        connection = self._open(end)
        channel = connection.open_channel(timeout_s=time_left(end))
        if channel is None:
            lost = None if connection.alive else HostError(self.host, Trouble.LOST, connection.why_lost())
            connection.close()
            raise lost or HostError(
                self.host,
                Trouble.LOGIN,
                "accepts the login but opens no channel for a command",
                hints=("`MaxSessions` of its sshd must be 1 or more",),
            )
        self._keep(connection, times_closed)
        return connection, channel

    @contextlib.contextmanager
    def _connect_alone(self, timeout_s: float) -> Iterator[None]:
        """Let one thread at a time connect; the others wait for it, for at most `timeout_s`."""
        if not self._connect_lock.acquire(timeout=timeout_s):
            raise HostError(self.host, Trouble.TIMED_OUT, f"no connection within {render_seconds(timeout_s)}")
        try:
            yield
        finally:
            self._connect_lock.release()


def _drop(started: tuple[Connection, paramiko.Channel]) -> None:
    started[1].close()
