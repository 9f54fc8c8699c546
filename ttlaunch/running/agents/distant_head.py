"""Joins who asks a serving run to a head on another host, through a socket on this machine that stands for the head's.

    door  <-- socket here -->  supervisor  <-- SSH, `agent/bridge.py` -->  the head's socket on its host

The socket is here only while the head answers, and takes one connection at a time. So the other side learns the same as from a
head on this machine: nobody listens before the model is loaded, and a connection that breaks can be made again. What passes is
only copied; both ends parse it.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.pushed import start_script
from ttlaunch.hosts.transport.transport import CHUNK, CONNECT_S, Process, Transport
from ttlaunch.running.agents.agent_connection import BRIDGE_MODULES
from ttlaunch.serving import wire

_SLICE_S, _PAUSE_S, _UNUSED_S, _WRITE_S = 1.0, 0.2, 30.0, 10.0


@contextmanager
def distant_head(transport: Transport, *, there: str, here: Path, python: str) -> Iterator[None]:
    """Let processes of this user connect at `here` to the head that listens at `there`, as often as they like.

    Args:
        transport: The head's host. Whoever owns it connects it again when its connection breaks.
        there: The path of the head's socket on its host, which need not be there yet.
        here: The path of the socket on this machine, in a folder that only this user may enter.
        python: An interpreter on the host.
    """
    head = _DistantHead(transport, there=there, here=here, python=python)
    thread = threading.Thread(target=head.follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        head.close()


class _DistantHead:
    def __init__(self, transport: Transport, *, there: str, here: Path, python: str) -> None:
        self._transport, self._there, self._here, self._python = transport, there, here, python
        self._over, self._lock = threading.Event(), threading.Lock()
        self._connection: socket.socket | None = None

    def follow(self) -> None:
        """Make one connection after the other, until `close`."""
        while not self._over.is_set():
            with contextlib.suppress(HostError, OSError):
                process = self._reach()
                try:
                    self._converse(process)
                finally:
                    process.kill()
            self._over.wait(_PAUSE_S)

    def close(self) -> None:
        """End the connection that there is, and make no other."""
        self._over.set()
        with self._lock:
            if self._connection is not None:
                _shut(self._connection)

    def _reach(self) -> Process:
        """Start a program on the host that connects to the head as soon as it listens.

        Raises:
            HostError: It cannot be started.
        """
        arguments = {"socket": self._there, "awaits": True}
        pythons = (self._python,)
        stream = start_script(
            self._transport, "bridge", beside=BRIDGE_MODULES, arguments=arguments, pythons=pythons, timeout_s=CONNECT_S
        )
        return stream.process  # Python has said its word, so everything from now on comes from the head

    def _converse(self, process: Process) -> None:
        """Let somebody connect here once the head has said its first words, and copy what both say until one has left.

        Raises:
            HostError: The connection to the host broke.
            OSError: The one on this machine did, or cannot be made.
        """
        first = self._read(process)
        connection = self._accept() if first else None
        if connection is None:
            return
        with connection:
            with self._lock:
                self._connection = connection
            try:
                connection.sendall(first)
                threading.Thread(target=_send, args=(connection, process), daemon=True).start()
                while data := self._read(process):
                    connection.sendall(data)
            finally:
                with self._lock:
                    self._connection = None
                _shut(connection)

    def _read(self, process: Process) -> bytes:
        """Wait for what the head says next; nothing if it has left, or `close` was called.

        Raises:
            HostError: The connection broke.
        """
        while not self._over.is_set():
            try:
                return process.read(CHUNK, timeout_s=_SLICE_S)
            except HostError as error:
                if error.trouble is not Trouble.TIMED_OUT:
                    raise
        return b""

    def _accept(self) -> socket.socket | None:
        """Wait for somebody who connects; None if nobody does, so that a head that has left meanwhile is noticed.

        Raises:
            OSError: The socket cannot be made.
        """
        self._here.unlink(missing_ok=True)
        with wire.listen(self._here) as listening:
            try:
                listening.settimeout(_PAUSE_S)
                for _ in range(round(_UNUSED_S / _PAUSE_S)):
                    with contextlib.suppress(TimeoutError):
                        return listening.accept()[0]
                    if self._over.is_set():
                        break
            finally:
                self._here.unlink(missing_ok=True)
        return None


def _send(connection: socket.socket, process: Process) -> None:
    """Copy what is asked to the host until either side ends, and then end both."""
    with contextlib.suppress(HostError, OSError):
        while data := connection.recv(CHUNK):
            process.write(data, timeout_s=_WRITE_S)
    _shut(connection)
    process.kill()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
