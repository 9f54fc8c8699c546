"""What the bytes of a lane go by: a plain socket within a host, TLS 1.3 between hosts.

TLS works on memory here and not on the socket: records are made and opened many at a time, and the kernel is asked once for all of
them. So a tensor may change as soon as its bytes are sealed, and what the kernel does not take yet is cipher text.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from ttlaunch.runtime.comm.grpc.directory import Certificates

_SOCKET_BYTES = 2**20  # what the kernel keeps of a lane within a host; more is not faster
_SEAL_BYTES = 2**18  # what is sealed, or received, at once; it stays in the processor's cache
_MOST_OWN_BYTES = 4 * _SEAL_BYTES  # twice what `send` leaves unsent; beyond, they are answers of TLS itself
_RECORD_BYTES = 2**14
_SENT_AT_ONCE = 2**14  # shorter parts share a record


_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Seconds until a lane that rests is tried, and between tries, and how many of these; as gRPC tries its connections."""


class Wire(Protocol):
    """One end of a connection between two workers, without blocking.

    Attributes:
        connection: Its socket.
        has_left: Whether more may have been received than was read, though the socket may not be readable.
    """

    connection: socket.socket
    has_left: bool

    def send(self, parts: Sequence[memoryview]) -> int:
        """Take bytes of these parts, and return how many; they may change from then on.

        Raises:
            BlockingIOError: Nothing can be taken now.
        """

    def flush(self) -> None:
        """Hand all that was taken to the kernel.

        Raises:
            BlockingIOError: The kernel does not take all of it now.
        """

    def recv_into(self, buffer: memoryview) -> int:
        """Receive some bytes, 0 at the end.

        Raises:
            BlockingIOError: There is nothing now.
        """

    def close(self) -> None:
        """End at once."""


class PlainWire:
    """A connected socket."""

    has_left = False

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)

    def send(self, parts: Sequence[memoryview]) -> int:
        return self.connection.sendmsg(parts)

    def flush(self) -> None:
        """Do nothing: what was taken is with the kernel."""

    def recv_into(self, buffer: memoryview) -> int:
        return self.connection.recv_into(buffer)

    def close(self) -> None:
        self.connection.close()


class Tls:
    """How one worker proves itself to those of other hosts, and checks that they are of its run."""

    def __init__(self, certificates: Certificates) -> None:
        self.accepting = _context(ssl.PROTOCOL_TLS_SERVER, certificates)
        self.accepting.num_tickets = 0  # no lane is opened twice
        self.opening = _context(ssl.PROTOCOL_TLS_CLIENT, certificates)
        self.box = memoryview(bytearray(_SEAL_BYTES))
        """Holds what the kernel has received until it is handed on at once; the lanes of a thread share it."""


class TlsWire:
    """A socket whose two ends have proved to each other who they are, once `shake_hands` has returned."""

    def __init__(self, connection: socket.socket, tls: Tls, *, peer: str | None) -> None:
        """Begin; `peer` is the name that the other end has to prove, None for the end that accepts whoever is of the run."""
        self.connection = connection
        self.has_left = True  # what came with the end of the handshake
        self._box = tls.box
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls.accepting if peer is None else tls.opening
        self._session = context.wrap_bio(self._in, self._out, server_side=peer is None, server_hostname=peer)
        # With a buffer it returns a number, which its type does not say.
        self._read_into = cast("Callable[[int, memoryview], int]", self._session.read)
        self._sealed = memoryview(b"")
        connection.settimeout(0)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a firewall may forget a lane that rests
            for option, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    async def shake_hands(self) -> None:
        """Prove who this end is, and check the other one.

        Raises:
            OSError: It is a stranger, speaks something else, or is gone.
        """
        while True:
            try:
                self._session.do_handshake()
            except ssl.SSLWantReadError:
                await self._hand_over()
                await self._receive_more()
            except ssl.SSLError:
                await self._hand_over()  # why it ends
                raise
            else:
                await self._hand_over()
                return

    @property
    def proven(self) -> frozenset[str | None]:
        """The names in the certificate of the other end."""
        found = self._session.getpeercert() or {}
        names = found.get("subjectAltName", ())
        return frozenset(str(entry[1]) for entry in names if entry[0] == "DNS")

    async def say(self, words: bytes) -> None:
        """Send a few bytes, before a lane is made of this wire."""
        self._session.write(words)
        await self._hand_over()

    async def hear(self, count: int) -> bytes:
        """Receive exactly so many bytes, before a lane is made of this wire.

        Raises:
            OSError: The other end refuses this one, or is gone.
        """
        heard = b""
        while len(heard) < count:
            try:
                heard += (more := self._session.read(count - len(heard)))
            except ssl.SSLWantReadError:
                await self._receive_more()
            else:
                if not more:
                    raise ConnectionResetError("it ended")
        return heard

    def send(self, parts: Sequence[memoryview]) -> int:
        if self._out.pending + len(self._sealed) >= _SEAL_BYTES:
            self.flush()
        if len(parts) > 1 and sum(map(len, parts)) <= _SENT_AT_ONCE:
            return self._session.write(b"".join(parts))
        return self._session.write(parts[0][:_SEAL_BYTES])

    def flush(self) -> None:
        while self._sealed or self._out.pending:
            if not self._sealed:
                self._sealed = memoryview(self._out.read())
            self._sealed = self._sealed[self.connection.send(self._sealed) :]

    def recv_into(self, buffer: memoryview) -> int:
        if not self.has_left:
            received = self.connection.recv_into(self._box)
            if received == 0:
                return 0
            self._in.write(self._box[:received])
        count, self.has_left = 0, True
        try:
            while count < len(buffer):
                read = self._read_into(_RECORD_BYTES, buffer[count : count + _RECORD_BYTES])
                if not read:  # the peer's TLS has said that it ends
                    return count
                count += read
        except ssl.SSLWantReadError:
            self.has_left = False
        if self._out.pending > _MOST_OWN_BYTES:
            raise ConnectionResetError("it asks for new keys again and again")
        if not count:
            raise BlockingIOError
        return count

    def close(self) -> None:
        self.connection.close()

    async def _hand_over(self) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, self._out.read())

    async def _receive_more(self) -> None:
        received = await asyncio.get_running_loop().sock_recv(self.connection, _RECORD_BYTES)
        if not received:
            raise ConnectionResetError("it ended")
        self._in.write(received)


def _context(protocol: int, certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificates.authority.decode())
    # `load_cert_chain` reads only files, and a private key is to be in none: this one is in memory and has no name.
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, certificates.own + certificates.key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
