"""Lanes: plain Unix sockets that carry the frames between two workers of one host, at the pace of plain TCP.

A gRPC stream takes four times as long, even for bytes that it does not look at. So within a host the call `Link` only says who sends,
is refused, and ends when a peer is gone. Whoever accepts it answers with a secret; the sender connects to the receiver's door,
which is a socket in the run's private folder, shows the secret, and both exchange frames there as they do on the stream.
"""

import asyncio
import contextlib
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ttlaunch.runtime.comm.grpc.frames import MOST_BYTES, BadFrameError, Parts

LANE = "ttlaunch-lane"
"""The metadata of an accepted call within a host: the secret that opens its lane."""

_SECRET_BYTES = 16
_LENGTH = struct.Struct("<I")
"""What comes before each frame. A length of 0 says that the sender ends, and that nothing was lost."""

_SOCKET_BYTES = 2**20  # what the kernel keeps of a lane; more is not faster
_AHEAD_BYTES = 2**14  # what is received beyond the frame that is awaited: many small ones come at once
_TURN_FRAMES = 4  # so that a long tensor to one peer does not hold up the others
_KNOCK_S = 10.0
_MOST_KNOCKING = 64
_RETRY_S = 0.01


class Lane:
    """Frames both ways over one connection, in the thread of an event loop.

    Attributes:
        ended: Has a result once no more frames pass: None after the peer's goodbye or `close`, else what went wrong, which is a
            `BadFrameError` for what no rank sends, and a `ConnectionError` where the peer is gone.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        guard: AbstractContextManager[object],
        take: Callable[[], Parts | None],
        feed: Callable[[memoryview], None],
    ) -> None:
        """Begin to receive.

        Args:
            connection: Closed when the lane ends.
            guard: Held while the memory of what is being sent is read.
            take: Returns the next frame to send, None if there is none now. The frame before it is with the kernel by then.
            feed: Takes a frame, whose bytes are only there until it returns; it may raise `BadFrameError`.
        """
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Exception | None] = self._loop.create_future()
        self._connection = connection
        self._guard, self._take, self._feed = guard, take, feed
        self._is_over = False  # what awaits `ended` may be cancelled, and then that is, too
        self._left: list[memoryview] = []  # of the frame that is being sent
        self._is_ending = False
        self._said_goodbye: asyncio.Future[Exception | None] = self._loop.create_future()
        self._buffer = memoryview(bytearray(_LENGTH.size + MOST_BYTES))
        self._filled = 0
        connection.settimeout(0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._loop.add_reader(connection, self._receive)

    def pump(self) -> None:
        """Send what there is to send, as far as the kernel takes it; the rest follows by itself."""
        if self._is_over:
            return
        try:
            for _ in range(_TURN_FRAMES):
                if not self._left and not self._begin_frame():
                    self._loop.remove_writer(self._connection)
                    return
                while self._left:
                    with self._guard:
                        self._advance(self._connection.sendmsg(self._left))
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)
            return
        self._loop.add_writer(self._connection, self.pump)

    def keep_left(self) -> None:
        """Copy what is left of the frame that is being sent: its tensor may change from now on. Called under the guard."""
        self._left = [memoryview(bytes(part)) for part in self._left]

    async def finish(self) -> None:
        """Send what is left, and say that nothing follows; returns early if the peer is gone."""
        self._is_ending = True
        self.pump()
        await asyncio.wait({self.ended, self._said_goodbye}, return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        """End at once."""
        self._end(None)

    def _begin_frame(self) -> bool:
        """Take what to send next; return False if there is nothing now."""
        with self._guard:
            parts = self._take()
            if parts is not None:
                head, payload = parts
                length = _LENGTH.pack(len(head) + len(payload))
                self._left = [memoryview(length + head), *([payload] if payload else [])]
                return True
        if self._is_ending and not self._said_goodbye.done():
            self._left = [memoryview(_LENGTH.pack(0))]
            self._said_goodbye.set_result(None)
        return bool(self._left)

    def _advance(self, sent: int) -> None:
        while self._left and sent >= len(self._left[0]):
            sent -= len(self._left.pop(0))
        if sent:
            self._left[0] = self._left[0][sent:]

    def _receive(self) -> None:
        try:
            end = min(max(self._awaited(), self._filled + _AHEAD_BYTES), len(self._buffer))
            count = self._connection.recv_into(self._buffer[self._filled : end])
            if count == 0:
                raise ConnectionResetError("it ended without a goodbye")
            self._filled += count
            self._feed_whole_frames()
        except BlockingIOError:
            pass
        except (OSError, BadFrameError) as error:
            self._end(error)

    def _awaited(self, begin: int = 0) -> int:
        """Return where in the buffer the frame ends that begins there."""
        if self._filled - begin < _LENGTH.size:
            return begin + _LENGTH.size
        (length,) = _LENGTH.unpack_from(self._buffer, begin)
        if length > MOST_BYTES:
            raise BadFrameError(f"a frame of {length} bytes; frames have at most {MOST_BYTES}")
        return begin + _LENGTH.size + int(length)

    def _feed_whole_frames(self) -> None:
        begin = 0
        while self._filled - begin >= _LENGTH.size and (end := self._awaited(begin)) <= self._filled:
            frame = self._buffer[begin + _LENGTH.size : end]
            if not frame:
                self._end(None)
                return
            self._feed(frame)
            if self._is_over:  # by what it was fed
                return
            begin = end
        left = self._filled - begin
        if begin and left:
            self._buffer[:left] = bytes(self._buffer[begin : self._filled])
        self._filled = left

    def _end(self, error: Exception | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        if not self.ended.done():
            self.ended.set_result(error)


class Door:
    """Where the lanes to one worker begin."""

    def __init__(self, place: Path) -> None:
        """Begin to listen, in the thread of an event loop.

        Raises:
            OSError: That is not possible there.
        """
        self._loop = asyncio.get_running_loop()
        self._place = place
        self._expected: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._knocking: set[asyncio.Task[None]] = set()
        place.unlink(missing_ok=True)  # of an earlier life
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(place))
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._listener.settimeout(0)
        self._loop.add_reader(self._listener, self._accept)

    @contextmanager
    def expect(self) -> "Iterator[tuple[str, asyncio.Future[socket.socket]]]":
        """Return a secret, and the connection of whoever shows it before the `with` statement ends."""
        secret = secrets.token_bytes(_SECRET_BYTES)
        arriving = self._expected[secret] = self._loop.create_future()
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
        for task in self._knocking:
            task.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._place.unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # whoever knocked is gone
            connection, _ = self._listener.accept()
            task = self._loop.create_task(self._let_in(connection))
            self._knocking.add(task)
            task.add_done_callback(self._has_answered)
        if len(self._knocking) >= _MOST_KNOCKING:
            # The next ones wait with the kernel: a peer that is sent away would not come again.
            self._loop.remove_reader(self._listener)

    def _has_answered(self, task: "asyncio.Task[None]") -> None:
        self._knocking.discard(task)
        if self._listener.fileno() >= 0:  # not closed
            self._loop.add_reader(self._listener, self._accept)

    async def _let_in(self, connection: socket.socket) -> None:
        arriving = None
        try:
            connection.settimeout(0)
            shown = await asyncio.wait_for(self._loop.sock_recv(connection, _SECRET_BYTES), _KNOCK_S)
            arriving = self._expected.pop(shown, None)
        except (OSError, TimeoutError):
            pass
        finally:
            if arriving is None or arriving.done():
                connection.close()
            else:
                arriving.set_result(connection)


def door_of(listening: Path) -> Path:
    """Return where the door of a worker is, by its Unix socket for gRPC."""
    return listening.with_suffix(".lane")


async def open_lane(place: Path, secret: str) -> socket.socket:
    """Connect to a door, and show a secret.

    Raises:
        OSError: Nobody listens there.
        ValueError: The secret is none.
    """
    shown = bytes.fromhex(secret)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(0)
        while True:
            try:
                connection.connect(str(place))
                break
            except BlockingIOError:  # too many knock at the same time
                await asyncio.sleep(_RETRY_S)
        connection.send(shown)
    except BaseException:
        connection.close()
        raise
    return connection
