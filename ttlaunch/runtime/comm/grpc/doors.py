"""Where lanes begin: each worker has a door on its host, a Unix socket, and one on its network if it has peers on other hosts.

Whoever is accepted by the call `Link` is told a secret, which opens a lane once. Both doors ask for it. The one on the network is
open for strangers: they have to prove first, by TLS, that they are of the run, and then show a secret that was made for the worker
that they have proved to be. It tells them that they are let in, so that whoever was sent away in a crowd can come again.
"""

import asyncio
import contextlib
import errno
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ttlaunch.runtime.comm.grpc.wires import PlainWire, Tls, TlsWire, Wire

LANE, LANE_PORT = "ttlaunch-lane", "ttlaunch-lane-port"
"""The metadata of an accepted call: the secret that opens its lane, and between hosts the port of the door."""

OPEN_S = 10.0
"""How long a peer on another host may take to let a worker in."""

_SECRET_BYTES = 16
_WELCOME = b"\x01"
_KNOCK_S = 10.0
_MOST_KNOCKING = 64
_RETRY_S = 0.01
_PAUSE_S = 0.1
_NONE_LEFT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Why a connection cannot be accepted that is still there."""

_AGAIN_S = 0.05  # a handshake costs both sides a millisecond


_LetIn = Callable[[socket.socket, Tls | None], Coroutine[Any, Any, bool]]


@dataclass(frozen=True)
class _Guest:
    """Whoever is expected; `name` is what it has to prove, None for somebody on this host."""

    name: str | None
    arriving: "asyncio.Future[Wire]"


class Door:
    """Where the lanes to one worker begin."""

    def __init__(self, place: Path, *, address: str | None = None, tls: Tls | None = None) -> None:
        """Begin to listen, in the thread of an event loop.

        Args:
            place: The Unix socket.
            address: The IP address at which peers of other hosts come.
            tls: What they prove themselves with; None if there are none.

        Raises:
            OSError: That is not possible there.
        """
        self._place = place
        self._expected: dict[bytes, _Guest] = {}
        self.port: int | None = None
        place.unlink(missing_ok=True)  # of an earlier life
        with contextlib.ExitStack() as opened:
            inside = opened.enter_context(socket.socket(socket.AF_UNIX))
            inside.bind(str(place))
            self._listeners = [_Listener(inside, None, self._let_in)]
            opened.callback(self.close)
            if address is not None and tls is not None:
                # The kernel draws the port, which is free as it listens at once; the call tells it to the peers.
                outside = opened.enter_context(socket.socket(_family(address)))
                outside.bind((address, 0))
                self.port = outside.getsockname()[1]
                self._listeners.append(_Listener(outside, tls, self._let_in))
            opened.pop_all()

    @contextmanager
    def expect(self, name: str | None = None) -> "Iterator[tuple[str, asyncio.Future[Wire]]]":
        """Return a secret, and the connection of whoever shows it before the `with` statement ends.

        Args:
            name: Whoever shows it has to come from another host, and to prove this name; None: comes from this host.
        """
        secret = secrets.token_bytes(_SECRET_BYTES)
        arriving: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
        self._expected[secret] = _Guest(name, arriving)
        try:
            yield secret.hex(), arriving
        except BaseException:
            # Cancelled, perhaps in the moment in which the connection came: nobody else would close it.
            if arriving.done() and not arriving.cancelled():
                arriving.result().close()
            raise
        finally:
            self._expected.pop(secret, None)
            arriving.cancel()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._place.unlink(missing_ok=True)

    async def _let_in(self, connection: socket.socket, tls: Tls | None) -> bool:
        """Give whoever has connected to those who expect it; return False if nobody does."""
        try:
            async with asyncio.timeout(_KNOCK_S):
                if tls is None:
                    connection.settimeout(0)
                    shown = await asyncio.get_running_loop().sock_recv(connection, _SECRET_BYTES)
                    return self._match(shown, PlainWire(connection), frozenset({None}))
                wire = TlsWire(connection, tls, peer=None)
                await wire.shake_hands()
                return self._match(await wire.hear(_SECRET_BYTES), wire, wire.proven)
        except (OSError, TimeoutError):
            return False

    def _match(self, shown: bytes, wire: Wire, proven: frozenset[str | None]) -> bool:
        guest = self._expected.get(shown)
        if guest is None or guest.name not in proven or guest.arriving.done():
            return False
        if guest.name is not None:
            wire.send((memoryview(_WELCOME),))
            wire.flush()
        del self._expected[shown]  # now: if the welcome does not get out, it comes again
        guest.arriving.set_result(wire)
        return True


class _Listener:
    """A listening socket, and those who knock at it: only so many at the same time."""

    def __init__(self, listening: socket.socket, tls: Tls | None, let_in: _LetIn) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening, self._tls, self._let_in = listening, tls, let_in
        self._knocking: set[asyncio.Task[bool]] = set()
        listening.listen(socket.SOMAXCONN)
        listening.settimeout(0)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        for task in self._knocking:
            task.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            if error.errno in _NONE_LEFT:  # the next look would find the same
                self._loop.remove_reader(self._listening)
                self._loop.call_later(_PAUSE_S, self._look_again)
            return  # else whoever knocked is gone
        task = self._loop.create_task(self._let_in(connection, self._tls))
        self._knocking.add(task)
        task.add_done_callback(partial(self._has_answered, connection))
        if len(self._knocking) < _MOST_KNOCKING:
            return
        if self._tls is None:
            # The next ones wait with the kernel: a peer that is sent away would not come again.
            self._loop.remove_reader(self._listening)
        else:
            # Strangers may fall silent, so that nobody can wait for them; a peer that is sent away for them comes again. By lot: of those
            # who came first, one would always be the peer that needs as long as 64 strangers need to come.
            drawn = secrets.choice(list(self._knocking))
            self._knocking.discard(drawn)
            drawn.cancel()

    def _has_answered(self, connection: socket.socket, task: "asyncio.Task[bool]") -> None:
        self._knocking.discard(task)
        if task.cancelled() or task.exception() or not task.result():  # a task may be cancelled before it begins
            connection.close()
        self._look_again()

    def _look_again(self) -> None:
        if self._listening.fileno() >= 0:  # not closed
            self._loop.add_reader(self._listening, self._accept)


def door_of(listening: Path) -> Path:
    """Return where the door of a worker is for those on its host, by its Unix socket for gRPC."""
    return listening.with_suffix(".lane")


async def open_lane(place: Path, secret: str) -> PlainWire:
    """Connect to a door on this host, and show a secret.

    Raises:
        OSError: Nobody listens there.
        ValueError: The secret is none.
    """
    shown = bytes.fromhex(secret)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(0)
        async with asyncio.timeout(_KNOCK_S + OPEN_S):
            while not _is_connected(connection, place):  # noqa: ASYNC110 - too many knock at the same time
                await asyncio.sleep(_RETRY_S)
        connection.send(shown)
        return PlainWire(connection)
    except BaseException:
        connection.close()
        raise


def _is_connected(connection: socket.socket, place: Path) -> bool:
    try:
        connection.connect(str(place))
    except BlockingIOError:
        return False
    return True


async def open_lane_over_network(address: tuple[str, int], secret: str, tls: Tls, *, peer: str) -> TlsWire:
    """Connect to a door on another host, which has to prove the name `peer`, and show a secret.

    Raises:
        OSError: Nobody listens there, it is somebody else, or does not let this worker in.
        TimeoutError: It did not do so within `OPEN_S`.
        ValueError: The secret is none.
    """
    shown = bytes.fromhex(secret)
    sent_away = None
    try:
        async with asyncio.timeout(OPEN_S):
            while True:
                try:
                    return await _knock(address, shown, tls, peer=peer)
                except (ConnectionResetError, BrokenPipeError) as error:  # perhaps only because of a crowd
                    sent_away = error
                await asyncio.sleep(_AGAIN_S)
    except TimeoutError:
        if sent_away is None:
            raise
        raise ConnectionResetError("it sends this worker away") from sent_away


async def _knock(address: tuple[str, int], shown: bytes, tls: Tls, *, peer: str) -> TlsWire:
    connection = socket.socket(_family(address[0]))
    try:
        connection.settimeout(0)
        await asyncio.get_running_loop().sock_connect(connection, address)
        wire = TlsWire(connection, tls, peer=peer)
        await wire.shake_hands()
        await wire.say(shown)
        await wire.hear(len(_WELCOME))
    except BaseException:
        connection.close()
        raise
    return wire


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
