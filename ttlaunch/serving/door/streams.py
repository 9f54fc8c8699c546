"""One stream of tokens as the door has it: what has arrived for its client, and what the head needs to continue it elsewhere."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

from ttlaunch.serving.wire import Accepted, Ask, Cancel, Done, Pause, Refused, Resume, Tokens

MOST_UNREAD_BYTES: Final = 16 << 10
"""What waits for a slow client before its stream is paused; the connection's own buffers come on top."""
_LEAST_UNREAD_BYTES: Final = MOST_UNREAD_BYTES // 4
_TOKEN_BYTES: Final = 40
"""What a token without text counts, so that a stream of them is bounded too."""


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """Nothing comes for a while, and why; if the ranks are being started again, the stream goes on afterwards."""

    reason: str
    is_restarting: bool


Event: TypeAlias = Accepted | Refused | Tokens | Done | Interrupted
Order: TypeAlias = Cancel | Pause | Resume


class Orders(Protocol):
    """Takes what a stream has to tell the head."""

    def __call__(self, order: Order, /) -> None: ...


class Stream:
    """The answer to one `Ask`. Its client's task reads the events; the link to the head adds them.

    Args:
        ask: What was asked, with the stream's number and its seed.
        order: Tells the head something about the stream.
    """

    def __init__(self, ask: Ask, order: Orders) -> None:
        self.ask = ask
        self.accepted: Accepted | None = None
        self.ids: list[int] = []
        self.ended = False
        self._characters = 0
        self._order = order
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._unread = 0
        self._paused = False

    def add(self, event: Event) -> None:
        """Take an event from the head, or the door's own `Interrupted`."""
        if self.ended:
            return
        match event:
            case Accepted():
                again, self.accepted = self.accepted is not None, event
                if again:
                    return
            case Tokens():
                self.ids += event.ids
                self._characters += len(event.text)
                self._unread += _size(event)
                if self._unread > MOST_UNREAD_BYTES and not self._paused:
                    self._paused = True
                    self._order(Pause(stream=self.ask.stream))
            case Refused() | Done():
                self.ended = True
        self._events.append(event)
        self._arrived.set()

    def again(self) -> Ask:
        """What to ask of a head that was started again."""
        self._paused = False
        return replace(self.ask, resumed=tuple(self.ids), resumed_characters=self._characters)

    def close(self) -> None:
        """Nobody reads this stream any more."""
        if not self.ended:
            self.ended = True
            self._order(Cancel(stream=self.ask.stream))

    async def next(self) -> Event:
        """Wait for the next event. After `Refused` or `Done` there is none, and this must not be called."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Tokens):
            self._unread -= _size(event)
            if self._paused and self._unread <= _LEAST_UNREAD_BYTES:
                self._paused = False
                if not self.ended:
                    self._order(Resume(stream=self.ask.stream))
        return event

    async def events(self) -> AsyncIterator[Event]:
        """Every further event, up to the last."""
        while True:
            event = await self.next()
            yield event
            if isinstance(event, Refused | Done):
                return


def _size(event: Tokens) -> int:
    return len(event.text.encode()) + _TOKEN_BYTES * (len(event.ids) + 20 * len(event.logprobs))
