"""Lanes: connections that carry the frames between two workers, at the pace of plain sockets.

A gRPC stream takes four times as long, even for bytes that it does not look at. So the call `Link` only says who sends, is refused,
and ends when a peer is gone. Whoever accepts it answers with a secret; the sender connects to the receiver's door, shows the secret,
and both exchange frames there. See `doors.py` for how lanes begin, and `wires.py` for what they go by.
"""

import asyncio
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager

from ttlaunch.runtime.comm.grpc.frames import MOST_BYTES, BadFrameError, Parts
from ttlaunch.runtime.comm.grpc.wires import Wire

_LENGTH = struct.Struct("<I")
"""What comes before each frame. A length of 0 says that the sender ends, and that nothing was lost."""

_AHEAD_BYTES = 2**14  # what is received beyond the frame that is awaited: many small ones come at once
_READ_LEFT_S = 5.0
_TURN_FRAMES = 4  # so that a long tensor to one peer does not hold up the others


class Lane:
    """Frames both ways over one connection, in the thread of an event loop.

    Attributes:
        ended: Has a result once no more frames pass: None after the peer's goodbye or `close`, else what went wrong, which is a
            `BadFrameError` for what no rank sends, and a `ConnectionError` where the peer is gone.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        guard: AbstractContextManager[object],
        take: Callable[[], Parts | None],
        feed: Callable[[memoryview], None],
    ) -> None:
        """Begin to receive.

        Args:
            wire: Closed when the lane ends.
            guard: Held while the memory of what is being sent is read.
            take: Returns the next frame to send, None if there is none now. The frame before it is with the kernel by then.
            feed: Takes a frame, whose bytes are only there until it returns; it may raise `BadFrameError`.
        """
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Exception | None] = self._loop.create_future()
        self._wire, self._connection = wire, wire.connection
        self._guard, self._take, self._feed = guard, take, feed
        self._is_over = False  # what awaits `ended` may be cancelled, and then that is, too
        self._left: list[memoryview] = []  # of the frame that is being sent
        self._is_ending = False
        self._mute: OSError | None = None  # why nothing can be sent any more
        self._has_said_goodbye = False
        self._goodbye_left: asyncio.Future[Exception | None] = self._loop.create_future()  # it is with the kernel
        self._buffer = memoryview(bytearray(_LENGTH.size + MOST_BYTES))
        self._filled = 0
        self._loop.add_reader(self._connection, self._receive)
        if wire.has_left:
            self._loop.call_soon(self._receive)

    def pump(self) -> None:
        """Send what there is to send, as far as the kernel takes it; the rest follows by itself."""
        if self._is_over or self._mute is not None:
            return
        try:
            for _ in range(_TURN_FRAMES):
                if not self._left and not self._begin_frame():
                    self._wire.flush()
                    self._loop.remove_writer(self._connection)
                    if self._has_said_goodbye and not self._goodbye_left.done():
                        self._goodbye_left.set_result(None)
                    return
                while self._left:
                    with self._guard:
                        self._advance(self._wire.send(self._left))
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError) as error:
            self._fall_silent(error)
            return
        except OSError as error:
            self._end(error)
            return
        self._loop.add_writer(self._connection, self.pump)

    def _fall_silent(self, error: OSError) -> None:
        """Send no more to a peer that has closed; what it sent before, perhaps its goodbye, may still be with the kernel."""
        self._mute, self._left = error, []
        self._loop.remove_writer(self._connection)
        self._loop.call_later(_READ_LEFT_S, self._end, error)  # it may have closed one direction only
        if not self._goodbye_left.done():
            self._goodbye_left.set_result(error)

    def keep_left(self) -> None:
        """Copy what is left of the frame that is being sent: its tensor may change from now on. Called under the guard."""
        self._left = [memoryview(bytes(part)) for part in self._left]

    async def finish(self) -> None:
        """Send what is left, and say that nothing follows; returns early if the peer is gone."""
        self._is_ending = True
        self.pump()
        await asyncio.wait({self.ended, self._goodbye_left}, return_when=asyncio.FIRST_COMPLETED)

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
        if self._is_ending and not self._has_said_goodbye:
            self._left = [memoryview(_LENGTH.pack(0))]
            self._has_said_goodbye = True
        return bool(self._left)

    def _advance(self, sent: int) -> None:
        while self._left and sent >= len(self._left[0]):
            sent -= len(self._left.pop(0))
        if sent:
            self._left[0] = self._left[0][sent:]

    def _receive(self) -> None:
        if self._is_over:
            return
        try:
            while True:
                end = min(max(self._awaited(), self._filled + _AHEAD_BYTES), len(self._buffer))
                count = self._wire.recv_into(self._buffer[self._filled : end])
                if count == 0:
                    raise self._mute or ConnectionResetError("it ended without a goodbye")
                self._filled += count
                self._feed_whole_frames()
                if self._is_over or not self._wire.has_left:
                    return
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
        self._wire.close()
        if not self.ended.done():
            self.ended.set_result(error)
