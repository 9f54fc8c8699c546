"""Writes a rank's flight recorder: what the rank does now and did last, in memory that outlives it.

The format is `ttlaunch/flight_recorder.py`. The runtime of recipes and the hooks in plain scripts write it. A rank of a recipe
that was started by hand has no scratch folder and keeps its recorder in private memory. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
import zlib
from pathlib import Path

from ttlaunch import contract
from ttlaunch.flight_recorder import (
    BEGUN_COLLECTIVE,
    CHANNEL,
    CHANNELS,
    CHANNELS_AT,
    COLLECTIVE,
    GROUP,
    IRECV,
    ISEND,
    MAGIC,
    NO_BUCKET,
    OPERATION,
    OPERATIONS,
    RECV,
    RING_AT,
    SEND,
    SENDS,
    SIZE,
    TEXT_BYTES,
    TEXTS_AT,
    VERB_AT,
    WORD_BEGUN,
    WORD_CHANNELS,
    WORD_CLOCK,
    WORD_EPOCH,
    WORD_MAGIC,
    WORD_MOVED,
    WORD_PASSES,
    WORD_PHASE,
    WORD_PHASE_SINCE,
    WORD_RANK,
    WORD_SLOWEST,
    WORD_STEPS,
    WORD_TEXTS,
    WORD_TIMED,
    WORLD,
)

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Label = tuple[str, int | None]
    """Operation, and the bucket that it is about."""

Place = tuple[str, int]
"""File and line."""

_VERB = struct.Struct("=H")


class FlightRecorder:
    """The flight recorder of one rank; only its main thread may write.

    Attributes:
        step: The step that further operations belong to.
        message: The number, in its channel, of the last message that `begin` entered.

    Cost: no message and no system call; 0.6 µs for the begin and the end of an operation together.
    """

    def __init__(self, path: Path | None, *, rank: int) -> None:
        """Create the file, and rename it when it is complete; without a path the recorder is in private memory.

        Raises:
            OSError: The file cannot be made.
        """
        self._map = mmap.mmap(-1, SIZE) if path is None else _mapped(path)
        self._words = memoryview(self._map).cast("q")
        self._pack = OPERATION.pack_into
        self._channels: dict[tuple[int, int, int], int] = {}
        self._texts: dict[str | Place | None, int] = {"": 0}
        self._begun = 0
        self.step = self.message = 0
        words = self._words
        words[WORD_RANK], words[WORD_CLOCK], words[WORD_EPOCH] = rank, time.monotonic_ns(), time.time_ns()
        words[WORD_MAGIC] = MAGIC
        if path is not None:
            path.with_suffix(".unfinished").rename(path)

    def begin(
        self,
        verb: int,
        label: Label,
        place: Place | None,
        *,
        peer: int,
        tag: int,
        size: int,
        now: int,
        message: int = 0,
    ) -> int:
        """Enter an operation that begins.

        Args:
            verb: One of those of the format.
            label: The operation's name, and the bucket that it is about.
            place: Where the recipe asked for it, if that is known.
            peer: The other rank.
            tag: The message's tag.
            size: Bytes.
            now: The time of the monotonic clock, in nanoseconds.
            message: The message's number in its channel; 0 if the message begins with this operation, which then counts it.

        Returns:
            The offset of the entry in the flight recorder, which `end` takes. Attribute `message` has the message's number.
        """
        words = self._words
        if not message:
            counter = self._channels.get((peer, tag, verb)) or self._add_channel(peer, tag, verb)
            message = words[counter] + 1
            words[counter] = self.message = message
        self._begun = number = self._begun + 1
        offset = RING_AT + number % OPERATIONS * OPERATION.size
        name, bucket = label
        texts = self._texts
        named = texts.get(name)
        if named is None:
            named = self._text(name)
        placed = 0 if place is None else texts.get(place, -1)
        if placed < 0:
            placed = self._text(place)
        if bucket is None:
            bucket = NO_BUCKET
        self._pack(
            self._map, offset, number, now, 0, size, message, self.step, peer, tag, bucket, verb, named, placed, 0
        )
        # Last: a reader in another process that sees this number finds the whole entry.
        words[WORD_BEGUN] = number
        return offset

    def end(self, offset: int, now: int) -> None:
        """Enter that an operation has ended."""
        # The third word of the entry: while it is 0, readers take the operation for one that is still under way.
        words = self._words
        words[(offset >> 3) + 2] = now
        # A time, not a count: operations of torch end in its own threads, two of which could count the same number.
        words[WORD_MOVED] = now

    def join_group(self, among: Sequence[int] | None = None) -> int:
        """Announce that this rank takes part in collective operations of MPI or torch, which `begin` enters under `GROUP`.

        Args:
            among: The ranks of the group, in an order that is the same on all of them; None: all.

        Returns:
            The tag of the group's operations.
        """
        tag = WORLD if among is None else zlib.crc32(repr([int(rank) for rank in among]).encode()) >> 1 or 1
        self._channels.get((GROUP, tag, COLLECTIVE)) or self._add_channel(GROUP, tag, COLLECTIVE)
        return tag

    @contextlib.contextmanager
    def meeting(self, name: str, *, tag: int = WORLD) -> Iterator[None]:
        """Enter for a block an operation in which the ranks of a group wait for each other."""
        offset = self.begin(COLLECTIVE, (name, None), None, peer=GROUP, tag=tag, size=0, now=time.monotonic_ns())
        yield
        self.end(offset, time.monotonic_ns())

    def begin_wait(self, offset: int) -> None:
        """Enter that the rank now waits for an operation of a group that it had begun in the background."""
        if _VERB.unpack_from(self._map, offset + VERB_AT) == (COLLECTIVE,):
            return  # who waits again for the same operation has not moved
        _VERB.pack_into(self._map, offset + VERB_AT, COLLECTIVE)
        self._words[WORD_MOVED] = time.monotonic_ns()

    def begin_step(self, step: int) -> None:
        """Enter that the following operations belong to this step."""
        self.step = step

    def end_step(self, nanoseconds: int) -> None:
        """Enter that the step is done, and how long it took."""
        words = self._words
        words[WORD_STEPS] = self.step
        words[WORD_TIMED] += 1
        words[WORD_SLOWEST] = max(words[WORD_SLOWEST], nanoseconds)

    def passed(self) -> None:
        """The rank has entered or left a pass through its model, which is progress too."""
        self._words[WORD_PASSES] += 1

    @contextlib.contextmanager
    def announced(self, phase: str) -> Iterator[None]:
        """Enter for a block that the rank does something that may take long, such as an evaluation."""
        before = self._words[WORD_PHASE]
        self.announce(phase)
        try:
            yield
        finally:
            self._enter_phase(before)

    def announce(self, phase: str) -> None:
        """Enter that the rank does something that may take long, until something else is announced."""
        self._enter_phase(self._texts.get(phase) or self._text(phase))

    def _enter_phase(self, number: int) -> None:
        self._words[WORD_PHASE] = number
        self._words[WORD_PHASE_SINCE] = time.monotonic_ns()

    def _text(self, key: str | Place | None) -> int:
        """The number of a text that is not known yet; 0 once there is no more room."""
        text = f"{key[0]}:{key[1]}" if isinstance(key, tuple) else str(key)
        data, used = text.replace("\0", "").encode("utf-8", "replace") + b"\0", self._words[WORD_TEXTS]
        if used + len(data) > TEXT_BYTES:
            self._texts[key] = 0
            return 0
        at = TEXTS_AT + used
        self._map[at : at + len(data)] = data
        self._words[WORD_TEXTS] = used + len(data)
        known = sum(1 for number in self._texts.values() if number)
        self._texts[key] = known + 1
        return known + 1

    def _add_channel(self, peer: int, tag: int, verb: int) -> int:
        """Return the place of a channel's counter; the last counter is for all channels that have no room of their own."""
        is_send = verb in SENDS
        # Blocking and non-blocking calls share one counter, since the peer cannot tell them apart.
        pairs = ((SEND, ISEND), (RECV, IRECV), (COLLECTIVE, BEGUN_COLLECTIVE))
        other = next((pair[pair[0] == verb] for pair in pairs if verb in pair), None)
        known = self._channels.get((peer, tag, other or verb))
        index = min(self._words[WORD_CHANNELS], CHANNELS)
        counter = known or (CHANNELS_AT + index * CHANNEL.size + 16) >> 3
        if known is None and index < CHANNELS:
            CHANNEL.pack_into(self._map, CHANNELS_AT + index * CHANNEL.size, peer, tag, is_send, 0)
            self._words[WORD_CHANNELS] = index + 1
        self._channels[peer, tag, verb] = counter
        return counter


def open_flight_recorder(environment: Mapping[str, str], *, rank: int) -> FlightRecorder:
    """Open a rank's recorder where its shim wants it; in private memory if there is no such place, or no room."""
    scratch = environment.get(contract.ENV_SCRATCH)
    if scratch:
        with contextlib.suppress(OSError):
            return FlightRecorder(Path(scratch, contract.recorder_file(rank)), rank=rank)
    return FlightRecorder(None, rank=rank)


def _mapped(path: Path) -> mmap.mmap:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path.with_suffix(".unfinished"), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # Writing to a page that has no room behind it would kill the rank with SIGBUS; here a full disk is an error.
        os.posix_fallocate(descriptor, 0, SIZE)
        return mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)
