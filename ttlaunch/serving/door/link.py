"""The door's link to the head: one connection for all streams, made again after a restart, and the truth about the run's health."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ttlaunch.serving import wire
from ttlaunch.serving.door.metrics import Meters
from ttlaunch.serving.door.streams import Interrupted, Order, Stream
from ttlaunch.serving.door.templates import Templates

LONGEST_SILENCE_S: Final = 5.0
"""For how long a token that has passed every stage proves that all of them work."""
LONGEST_ABSENCE_S: Final = 60.0
"""How long streams wait for a head that is gone while nobody says that it is being started again."""
LONGEST_OLD_S: Final = 30.0
"""For how long new streams still get the old weights, if there is always an open one, when there are newer ones."""
WARN_EVERY_S: Final = 60.0
"""How often at most the log says that what the head sent was wrong: its connection is made again several times a second."""
_PING_EVERY_S: Final = 1.0
_TRY_EVERY_S: Final = 0.2
_MOST_UNSENT_BYTES: Final = 8 << 20

log = logging.getLogger("ttlaunch.serving.door")


class NotReadyError(Exception):
    """The run cannot take a stream now, and why."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """What `/health` answers. `since` is in seconds of the Unix clock."""

    status: str
    reason: str | None
    since: float

    @property
    def healthy(self) -> bool:
        return self.status == "connected"


class Link:
    """Asks the head and hands its answers to the streams.

    Args:
        path: The head's socket.
        meters: Counts what passes.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(self, path: Path, *, meters: Meters, clock: Callable[[], float] = time.monotonic) -> None:
        self.hello: wire.Hello | None = None
        self.stats: wire.Stats | None = None
        self._path = path
        self._meters = meters
        self._clock = clock
        self.templates = Templates()
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._run_state = wire.RunState(state="loading")
        self._last_token = self._lost_at = float("-inf")
        self._lost_because: str | None = None
        self._pinged = self._answered = 0
        self._health = Health(status="loading", reason="the model is being loaded", since=time.time())
        self._reconnect = asyncio.Event()
        self._retiring_since: float | None = None
        self._is_retired = False
        self._warned_at, self._unsaid = float("-inf"), 0

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def ask(self, ask: wire.Ask) -> Stream:
        """Begin a stream; its number, and a seed where there is none, are chosen here.

        Raises:
            NotReadyError: If no head is there, or as many streams are open as it takes.
            wire.WireError: If what is asked is too long for a message.
        """
        if not self._holds_streams and (self._writer is None or self.hello is None):
            raise NotReadyError(self.health().reason or "the model is not ready")
        numbered = replace(ask, stream=next(self._numbers))
        message = wire.encode(numbered)
        stream = self._streams[numbered.stream] = Stream(numbered, self._order)
        if not self._holds_streams:
            self._send(message)
        return stream

    @property
    def _holds_streams(self) -> bool:
        """Whether new streams wait for newer weights; `_begin` sends them."""
        since = self._retiring_since
        return since is not None and (self._is_retired or self._clock() - since > LONGEST_OLD_S)

    def health(self) -> Health:
        """Whether a token has passed every stage in the last seconds; if not, what is known of the cause."""
        status, reason = self._status()
        if status != self._health.status:
            self._health = replace(self._health, status=status, since=time.time())
        if reason != self._health.reason:
            self._health = replace(self._health, reason=reason)
        return self._health

    def _status(self) -> tuple[str, str | None]:
        state = self._run_state
        if state.state == "failed":
            return "disconnected", state.reason or "the run has ended"
        if self._writer is None or self.hello is None:
            if self._lost_because is None or state.state == "retiring":
                return "loading", state.reason or "the model is being loaded"
            return "disconnected", state.reason or self._lost_because
        silent_s = self._clock() - self._last_token
        if state.state == "restarting":
            return "degraded", state.reason or "ranks are being started again"
        if silent_s > LONGEST_SILENCE_S:
            return "degraded", state.reason or f"no token has passed every stage in the last {LONGEST_SILENCE_S:g} s"
        return "connected", None

    def take_run_state(self, state: wire.RunState) -> None:
        """Learn from the supervisor how the ranks are; open streams learn of a restart, and end with the run."""
        if state.state == "retiring" and self._retiring_since is None:
            self._retiring_since = self._clock()
        self._run_state = state
        reason = state.reason or "the run has ended"
        if state.state == "failed":
            self._end_streams(reason)
        elif state.state == "restarting":
            for stream in self._streams.values():
                stream.add(Interrupted(reason=reason, is_restarting=True))

    async def reconnect(self) -> bool:
        """Give up the connection and make a new one, over which open streams go on; whether a head was there soon."""
        former = self._writer
        self._reconnect.set()
        for _ in range(round(LONGEST_SILENCE_S / _TRY_EVERY_S)):
            await asyncio.sleep(_TRY_EVERY_S)
            if self._writer is not None and self._writer is not former:
                return True
        return False

    async def run(self) -> None:
        """Keep the connection, until cancelled."""
        try:
            while True:
                await self._run_once()
                await asyncio.sleep(_TRY_EVERY_S)
        finally:
            self.templates.close()

    async def _run_once(self) -> None:
        """Connect to the head, if it is there, and serve the connection until it ends."""
        self._reconnect.clear()
        try:
            reader, writer = await self._connect()
        except OSError:
            self._give_up_late()
            return
        try:
            await self._converse(reader, writer)
        finally:
            self._lose(writer)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = wire.connect(self._path)
        connection.setblocking(False)  # noqa: FBT003 - the name of the parameter is the method's
        return await asyncio.open_unix_connection(sock=connection, limit=wire.LONGEST_FRAME)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends; what is wrong with it is kept as the reason."""
        self._lost_because = "the head has closed its connection"
        decoder = wire.Decoder(wire.FROM_HEAD, sender="the head")
        pinging = asyncio.create_task(self._ping(writer))
        renewing = asyncio.create_task(self._reconnect.wait())
        try:
            while True:
                reading = asyncio.create_task(reader.read(1 << 16))
                await asyncio.wait({reading, renewing}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    self._lost_because = "the connection is being made again"
                    return
                received = reading.result()
                if not received:
                    decoder.finish()
                    return
                for message in decoder.feed(received):
                    self._take(message, writer)
        except wire.WireError as error:
            self._lost_because = str(error)
            self._warn(str(error))
        except OSError:
            pass
        finally:
            pinging.cancel()
            renewing.cancel()

    def _warn(self, what: str) -> None:
        """Log what is wrong with the head's messages, unless something was said about them lately."""
        if self._clock() - self._warned_at < WARN_EVERY_S:
            self._unsaid += 1
            return
        before = f"; {self._unsaid} more times since the last such line" if self._unsaid else ""
        self._warned_at, self._unsaid = self._clock(), 0
        log.warning("%s%s", what, before)

    def _take(self, message: Any, writer: asyncio.StreamWriter) -> None:
        match message:
            case wire.Hello():
                first, self.hello = self._writer is None, message
                if message.chat_template is not None:
                    self.templates.begin()
                if first:
                    self._begin(writer)
            case wire.Pong():
                self._answered = max(self._answered, message.number)
                self._last_token = self._clock()
            case wire.Stats():
                self.stats = message
            case wire.Accepted() | wire.Refused() | wire.Tokens() | wire.Done():
                if isinstance(message, wire.Tokens) and message.ids:
                    self._last_token = self._clock()
                self._meters.see(message, self._clock())
                stream = self._streams.get(message.stream)
                if isinstance(message, wire.Refused | wire.Done):
                    self._streams.pop(message.stream, None)
                if stream is not None:
                    stream.add(message)

    def _begin(self, writer: asyncio.StreamWriter) -> None:
        """Use a connection whose head has said hello, and continue the streams of the former one."""
        self._writer = writer
        self._lost_at = float("-inf")
        self._retiring_since, self._is_retired = None, False
        if self._run_state.state in {
            "loading",
            "restarting",
            "retiring",
        }:  # the supervisor cannot see when a head is ready
            self._run_state = wire.RunState(state="running")
        hello = self.hello
        for number, stream in list(self._streams.items()):
            if stream.ended:  # closed while no head was there
                del self._streams[number]
            elif hello and stream.accepted and stream.accepted.weights_sha256 != hello.weights_sha256:
                del self._streams[number]
                stream.add(_error(stream, "the weights have changed while the ranks were started again"))
            else:
                self._send(wire.encode(stream.again()))

    def _lose(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        self._writer = None
        self._lost_at = self._clock()
        self._last_token = float("-inf")
        self._pinged = self._answered
        is_restarting = self._run_state.state == "restarting"  # otherwise the supervisor will say what follows
        for stream in self._streams.values():
            reason = self._run_state.reason or self._lost_because or ""
            stream.add(Interrupted(reason=reason, is_restarting=is_restarting))

    def _give_up_late(self) -> None:
        """End streams that wait for a head of which nobody says that it comes back."""
        if self._run_state.state != "restarting" and self._clock() - self._lost_at > LONGEST_ABSENCE_S:
            self._end_streams(self._lost_because or "no head is there")

    def _end_streams(self, reason: str) -> None:
        ending, self._streams = self._streams, {}
        for stream in ending.values():
            stream.add(_error(stream, reason))

    async def _ping(self, writer: asyncio.StreamWriter) -> None:
        """Ask for a token through every stage once a second, and never for a second one before the first has come back."""
        while True:
            self._retire_if_idle()
            if self._writer is writer and self._pinged == self._answered:
                self._pinged += 1
                self._send(wire.encode(wire.Ping(number=self._pinged)))
            await asyncio.sleep(_PING_EVERY_S if self._writer is writer else _TRY_EVERY_S)

    def _retire_if_idle(self) -> None:
        """Let the head end for newer weights, once; streams that wait for those do not count."""
        waiting = sum(stream.accepted is None for stream in self._streams.values()) if self._holds_streams else 0
        if self._retiring_since is None or self._is_retired or len(self._streams) > waiting:
            return
        self._is_retired = True
        self._send(wire.encode(wire.Retire()))

    def _order(self, order: Order) -> None:
        self._meters.see_order(order)
        if self._writer is not None:
            self._send(wire.encode(order))

    def _send(self, message: bytes) -> None:
        if self._writer is None:
            return
        self._writer.write(message)
        if self._writer.transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            self._lost_because = "the head does not read what it is asked"
            self._writer.transport.abort()


def _error(stream: Stream, reason: str) -> wire.Done:
    prompt = stream.accepted.prompt_tokens if stream.accepted else ()
    return wire.Done(
        stream=stream.ask.stream,
        reason="error",
        message=reason,
        prompt_tokens=len(prompt),
        generated=len(stream.ids),
    )
