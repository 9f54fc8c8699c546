"""Both ends of the messages from one rank to another, without any connection: frames go in, frames come out.

A small tensor is sent at once, as long as the receiver has room for it. A large one is sent when the receiver has granted it, which
the receiver does as soon as its receive begins. So a receiver never keeps more than `EAGER_BYTES` of what it has not asked for, a
message that nobody has asked for holds up no other, and no tensor is copied on its way except from and to the frames.

    sender                       receiver
    post: small       DATA  →    kept until `post`, then  ←  CREDIT, for many messages at once
    post: large   ANNOUNCE  →
                            ←    GRANT, when `post` has been called
                      DATA  →    into the tensor
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from ttlaunch.runtime.comm.grpc.frames import CHUNK_BYTES, EMPTY, BadFrameError, Frame, Kind, Layout, Parts, parts_of
from ttlaunch.runtime.comm.protocol import CommunicationError

INLINE_BYTES = 2**14
"""The largest tensor that is sent before the receiver has asked for it."""

EAGER_BYTES = 2**20
"""How much the receiver keeps of what it has not asked for."""

_OVERHEAD_BYTES = 256  # of a message that is kept, beside its tensor
_MOST_WAITING = 2**16  # announcements, or grants, without a counterpart

Message = tuple[int, int]
"""The tag of a message, and its number among those of this tag."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One end of a message.

    Attributes:
        view: The tensor's bytes.
        moved: How many of them have been sent or received.
        granted: Whether the receiver has granted the message.
        done: Whether nothing more will happen.
        error: Why it failed.
    """

    layout: Layout
    view: memoryview = field(repr=False)
    moved: int = 0
    granted: bool = False
    done: bool = False
    error: CommunicationError | None = None

    def fail(self, error: CommunicationError) -> None:
        self.error, self.done = error, True


class Outgoing:
    """The messages to one rank."""

    def __init__(self, *, epoch: int = 0, incarnation: int = 0, inline_bytes: int = INLINE_BYTES) -> None:
        """Begin without a message; `inline_bytes` of -1 makes every message wait for its grant."""
        self._epoch = epoch
        self._incarnation = incarnation
        self._inline_bytes = inline_bytes
        self._posted: Counter[int] = Counter()  # by tag
        self._announcements: deque[Message] = deque()
        self._ready: deque[tuple[Message, Transfer]] = deque()
        self._held: dict[Message, Transfer] = {}
        self._granted: set[Message] = set()
        self._kept_bytes = 0  # by the receiver, at most

    def post(self, transfer: Transfer, *, tag: int) -> None:
        """Send a message as soon as the receiver has room for it."""
        message = tag, self._posted[tag]
        self._posted[tag] += 1
        cost = _kept(transfer.layout)
        if message in self._granted:
            self._granted.remove(message)
        elif transfer.layout.total <= self._inline_bytes and self._kept_bytes + cost <= EAGER_BYTES:
            self._kept_bytes += cost
        else:
            self._held[message] = transfer
            self._announcements.append(message)
            return
        self._ready.append((message, transfer))

    def take(self) -> tuple[Parts, Transfer | None] | None:
        """Return the next frame to send, and the transfer that is done when it has been sent; None if there is none now.

        The frame's payload is the tensor's memory. After `abandon` it must not be read any more.
        """
        while self._announcements:
            message = self._announcements.popleft()
            if message in self._held:  # else it was granted meanwhile
                return self._pack(Kind.ANNOUNCE, message, self._held[message].layout), None
        if not self._ready:
            return None
        message, transfer = self._ready.popleft()
        end = min(transfer.moved + CHUNK_BYTES, transfer.layout.total)
        piece = transfer.view[transfer.moved : end]
        data = self._pack(Kind.DATA, message, transfer.layout, offset=transfer.moved, payload=piece)
        transfer.moved = end
        if end == transfer.layout.total:
            return data, transfer
        self._ready.append((message, transfer))  # messages take turns, so a small one does not wait for a large one
        return data, None

    def feed(self, frame: Frame) -> bool:
        """Take note of an answer of the receiver; return False, because no answer ends a transfer.

        Raises:
            BadFrameError: No receiver answers so.
        """
        message = frame.tag, frame.number
        if frame.kind == Kind.CREDIT and frame.offset <= self._kept_bytes:
            self._kept_bytes -= frame.offset
        elif frame.kind == Kind.GRANT and message in self._held:
            self._ready.append((message, self._held.pop(message)))
        elif frame.kind == Kind.GRANT and len(self._granted) < _MOST_WAITING:
            if frame.number >= self._posted[frame.tag]:  # else it was sent without one
                self._granted.add(message)
        else:
            raise BadFrameError(f"an answer that fits no message ({frame.kind.name})")
        return False

    def abandon(self) -> list[Transfer]:
        """Forget and return the transfers that are not done; nothing reads their tensors any more."""
        left = [*(transfer for _, transfer in self._ready), *self._held.values()]
        self._ready.clear()
        self._held.clear()
        return left

    def _pack(
        self, kind: Kind, message: Message, layout: Layout, *, offset: int = 0, payload: memoryview = EMPTY
    ) -> Parts:
        return parts_of(Frame(kind, *message, self._epoch, self._incarnation, layout, offset, payload))


class Incoming:
    """The messages from one rank."""

    def __init__(self, sender: str, *, epoch: int = 0, incarnation: int = 0) -> None:
        """Begin without a message; `sender` is how errors name the rank."""
        self._sender = sender
        self._epoch = epoch
        self._incarnation = incarnation
        self._posted: Counter[int] = Counter()  # by tag
        self._waiting: dict[Message, Transfer] = {}
        self._early: dict[Message, Frame] = {}
        self._early_bytes = 0
        self._unwanted: dict[Message, int] = {}  # bytes to come of messages that fitted no receive
        self._answers: deque[Frame] = deque()
        self._taken_bytes = 0  # for which no credit was given yet

    def post(self, transfer: Transfer, *, tag: int) -> None:
        """Receive the next message of a tag."""
        message = tag, self._posted[tag]
        self._posted[tag] += 1
        self._waiting[message] = transfer
        early = self._early.pop(message, None)
        if early is not None:
            if early.kind == Kind.DATA:
                self._early_bytes -= _kept(early.layout)
            self._match(message, early)
        elif transfer.layout.total > INLINE_BYTES:
            self._grant(message, transfer)

    def feed(self, frame: Frame) -> bool:
        """Take a frame of the sender, whose payload need not outlive the call; return whether a transfer is done now.

        Raises:
            BadFrameError: No sender sends it.
        """
        message = frame.tag, frame.number
        if frame.kind not in {Kind.DATA, Kind.ANNOUNCE}:
            raise BadFrameError(f"a frame that only a receiver sends ({frame.kind.name})")
        if message in self._unwanted:
            self._drop(message, frame)
            return False
        transfer = self._waiting.get(message)
        if transfer is None:
            self._keep(message, frame)
            return False
        self._match(message, frame)
        return transfer.done

    def take(self) -> tuple[Parts, None] | None:
        """Return the next answer to the sender, which ends no transfer; None if there is none now."""
        return (parts_of(self._answers.popleft()), None) if self._answers else None

    def abandon(self) -> list[Transfer]:
        """Forget and return the transfers that are not done; nothing writes to their tensors any more."""
        left = list(self._waiting.values())
        self._waiting.clear()
        return left

    def _match(self, message: Message, frame: Frame) -> None:
        transfer = self._waiting[message]
        if frame.layout != transfer.layout:
            del self._waiting[message]
            transfer.fail(CommunicationError(f"{self._sender} sent {frame.layout}, expected {transfer.layout}"))
            if frame.kind == Kind.DATA or transfer.granted:  # its bytes come all the same
                self._unwanted[message] = frame.layout.total
            if frame.kind == Kind.DATA:
                self._drop(message, frame)
        elif frame.kind == Kind.ANNOUNCE:
            self._grant(message, transfer)
        elif frame.offset != transfer.moved:
            raise BadFrameError("pieces of a message in another order")
        else:
            end = frame.offset + len(frame.payload)
            transfer.view[frame.offset : end] = frame.payload
            transfer.moved = end
            if end == transfer.layout.total:
                del self._waiting[message]
                transfer.done = True
                self._give_credit(transfer)

    def _keep(self, message: Message, frame: Frame) -> None:
        """Keep what nobody has asked for yet."""
        is_past = frame.number < self._posted[frame.tag]
        if is_past or message in self._early or len(self._early) >= _MOST_WAITING:
            raise BadFrameError("a message that was sent already, or too many that nobody has asked for")
        if frame.kind == Kind.DATA:
            self._early_bytes += _kept(frame.layout)
            if len(frame.payload) != frame.layout.total or self._early_bytes > EAGER_BYTES:
                raise BadFrameError("more than was granted")
            frame = replace(frame, payload=memoryview(bytes(frame.payload)))
        self._early[message] = frame

    def _drop(self, message: Message, frame: Frame) -> None:
        self._unwanted[message] -= len(frame.payload)
        if self._unwanted[message] <= 0:
            del self._unwanted[message]

    def _grant(self, message: Message, transfer: Transfer) -> None:
        if not transfer.granted:
            transfer.granted = True
            self._answers.append(Frame(Kind.GRANT, *message, self._epoch, self._incarnation))

    def _give_credit(self, transfer: Transfer) -> None:
        """Tell the sender, once for many messages, that there is room again."""
        if transfer.granted:
            return
        self._taken_bytes += _kept(transfer.layout)
        if self._taken_bytes >= EAGER_BYTES // 2:
            credit = Frame(Kind.CREDIT, 0, 0, self._epoch, self._incarnation, offset=self._taken_bytes)
            self._answers.append(credit)
            self._taken_bytes = 0


_End = TypeVar("_End", Outgoing, Incoming)


class Fence(Generic[_End]):
    """One end of the messages between two ranks through all epochs; no frame reaches the end of another epoch.

    Ranks begin an epoch one after the other. What comes of a later epoch is kept in an end of its own, of which the same limits
    hold, and what comes of an earlier one is dropped. So the link goes on while its ranks change the epoch.

    Attributes:
        end: The end of this epoch.
        dropped: How many frames of other epochs, or of another life of the peer, were dropped.
    """

    def __init__(self, make: Callable[[int], _End], *, epoch: int, incarnation: int) -> None:
        """Begin an epoch; `make` makes an end for one, and the sender's frames carry the incarnation."""
        self.end: _End = make(epoch)
        self.dropped = 0
        self._make: Callable[[int], _End] = make
        self._epoch = epoch
        self._incarnation = incarnation
        self._is_over = False
        self._later: tuple[int, _End] | None = None

    def begin(self, epoch: int) -> None:
        """Go on with another epoch, and with what came of it already."""
        later, self._later = self._later, None
        if later is not None and later[0] > epoch:
            self._later, later = later, None
        self.end = later[1] if later is not None and later[0] == epoch else self._make(epoch)
        self._epoch, self._is_over = epoch, False

    def abandon(self) -> list[Transfer]:
        """End this epoch, and return the transfers that are not done; what was received before remains."""
        self._is_over = True
        return self.end.abandon()

    def feed(self, frame: Frame) -> bool:
        """Give a frame to the end of its epoch; return whether a transfer is done now.

        Raises:
            BadFrameError: The peer of this end sends no such frame.
        """
        end = self._end_for(frame)
        if end is None:
            self.dropped += 1
            return False
        return end.feed(frame)

    def _end_for(self, frame: Frame) -> _End | None:
        if frame.incarnation != self._incarnation or frame.epoch < self._epoch:
            return None
        if frame.epoch == self._epoch:
            return None if self._is_over else self.end
        if self._later is None or self._later[0] < frame.epoch:
            self._later = frame.epoch, self._make(frame.epoch)
        epoch, end = self._later
        return end if frame.epoch == epoch else None


def _kept(layout: Layout) -> int:
    return layout.total + _OVERHEAD_BYTES
