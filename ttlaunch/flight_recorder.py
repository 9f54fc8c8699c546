"""A rank's flight recorder: its last operations and its counters, in memory that outlives the rank.

The rank writes it (`flight_recorder_writer.py`); this module reads it, also while the rank hangs or after it
was killed. Like `contract.py`, it is shared by launcher, agent and rank: Python 3.9 and the standard library only.

A recording is a header of 64-bit integers, a table of channels (how many messages were begun with each peer under each tag), a
ring of the last operations, and the texts that operations refer to by number. All of it is in the host's own byte order.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Mapping

MAGIC = int.from_bytes(b"TTLBOX1\0", "little")
HEADER_WORDS = 16
WORD_MAGIC, WORD_RANK, WORD_CLOCK, WORD_EPOCH, WORD_BEGUN, WORD_STEPS, WORD_TIMED = range(7)
WORD_SLOWEST, WORD_PASSES, WORD_PHASE, WORD_PHASE_SINCE, WORD_TEXTS, WORD_CHANNELS, WORD_MOVED = range(7, 14)
"""Words of the header.

`CLOCK` and `EPOCH` are the same moment by the monotonic and by the wall clock, in nanoseconds; `BEGUN`: operations begun;
`STEPS`: the last step that was finished; `TIMED`: how many steps were timed; `SLOWEST`: the slowest of them, in nanoseconds;
`PASSES`: passes through the model; `PHASE`: the text that the rank has announced, 0 for none; `TEXTS`: bytes of texts in use;
`CHANNELS`: channels in use; `MOVED`: when an operation last ended, or was last found to be waited for, by the monotonic clock.

Whatever a rank enters changes the header, so a reader that finds the header as it was need not read the rest.
"""

CHANNEL = struct.Struct("=iiqq")
"""Peer, tag, whether it sends, messages begun."""

OPERATION = struct.Struct("=qqqqqiiiiHHHH")
"""Number, begin and end by the monotonic clock (end 0: not yet), bytes, which message of its channel, step,
peer, tag, bucket, verb, text of its name, text of its place, unused."""

CHANNELS, OPERATIONS, TEXT_BYTES = 512, 128, 16384
HEADER_BYTES = CHANNELS_AT = 8 * HEADER_WORDS
RING_AT = (
    CHANNELS_AT + (CHANNELS + 1) * CHANNEL.size
)  # one more entry counts the messages of all channels beyond the table
TEXTS_AT = RING_AT + OPERATIONS * OPERATION.size
SIZE = TEXTS_AT + TEXT_BYTES

SEND, RECV, ISEND, IRECV, WAIT_SEND, WAIT_RECV, COLLECTIVE, BEGUN_COLLECTIVE, WAIT_ANY, SKIPPED = range(1, 11)
VERBS = ("?", "send", "recv", "isend", "irecv", "wait for send", "wait for recv", "", "", "wait for any", "skipped")
SENDS = frozenset({SEND, ISEND, WAIT_SEND})
VERB_AT = 56
"""The offset of the two-byte verb in a packed operation. It changes when a rank begins to wait for a background operation."""

NO_BUCKET = -1
GROUP = -1
"""Stands in place of a peer in a collective operation of MPI or torch. Its tag names the group. From the moment at which a rank
joins the group it has a channel of this tag, which counts the group's operations."""

ANY = -2
"""Stands in place of a peer: any rank that has not yet sent a message of this tag that this rank has requested."""

NOBODY = -3
"""Stands in place of a peer in the entry of what a rank has left out, which is no operation: nobody waits in it."""

WORLD = 0
"""The tag of the group of all ranks."""

DATA_PARALLEL_START = "DistributedDataParallel's start"
"""The operation in which ranks form a replica's group. It is also where torch imports its compiler, which takes seconds."""
DONE = "done"
"""The phase that a rank announces when its role has returned."""


@dataclass(frozen=True)
class Operation:
    """One operation of a rank's communicator, such as a send.

    Attributes:
        begun, ended: Nanoseconds by the monotonic clock of the rank's host; `ended` is 0 while the operation lasts.
        message: The message's number in its channel, from 1; meaningless if the recording has no such channel.
        bucket: The bucket's number; -1 if the operation belongs to none.
        place: `file:line` of the recipe; empty if it is not known.
    """

    number: int
    begun: int
    ended: int
    nbytes: int
    message: int
    step: int
    peer: int
    tag: int
    bucket: int
    verb: int
    name: str
    place: str

    @property
    def is_send(self) -> bool:
        return self.verb in SENDS

    @property
    def is_collective(self) -> bool:
        return self.peer == GROUP

    @property
    def is_for_any(self) -> bool:
        return self.peer == ANY

    @property
    def is_open(self) -> bool:
        """Whether the operation has not ended yet."""
        return self.ended == 0


@dataclass(frozen=True)
class Recording:
    """What a recording held at one moment.

    Attributes:
        begun: The number of operations begun.
        moved: When an operation last ended, or was last found to be waited for, in nanoseconds by the monotonic clock; 0 before.
        steps: The last step that was finished.
        timed: The number of steps that were timed.
        slowest: The duration of the slowest timed step, in nanoseconds.
        passes: The number of passes through the model.
        phase: What the rank announced that it is doing; empty if it announced nothing.
        phase_since: When the phase began, in nanoseconds by the monotonic clock of the rank's host.
        channels: The number of messages begun, by peer, tag and whether this rank sends them.
        operations: The last operations, oldest first.
    """

    rank: int
    clock: int
    epoch: int
    begun: int
    moved: int
    steps: int
    timed: int
    slowest: int
    passes: int
    phase: str
    phase_since: int
    channels: Mapping[tuple[int, int, bool], int]
    operations: tuple[Operation, ...]

    @property
    def waiting(self) -> Operation | None:
        """The operation that the rank is in; None if it computes, reads or sleeps."""
        last = self.operations[-1] if self.operations else None
        if last is not None and last.is_open and not last.is_collective:
            return last
        waited_for = (one for one in self.operations if one.is_open and one.verb == COLLECTIVE and one.is_collective)
        return next(waited_for, None)

    def seconds(self, moment: int) -> float:
        """Convert a time of the rank's monotonic clock to seconds since the epoch, by the clock of the rank's host."""
        return (self.epoch + moment - self.clock) / 1e9


def is_header(data: bytes) -> bool:
    """Whether these are the first `HEADER_BYTES` of a recording."""
    return len(data) == HEADER_BYTES and int.from_bytes(data[:8], sys.byteorder) == MAGIC


def read_recorder(data: bytes) -> Recording | None:
    """Parse the bytes of a recording; None for anything else."""
    if len(data) != SIZE:
        return None
    words = struct.unpack_from(f"={HEADER_WORDS}q", data)
    if words[WORD_MAGIC] != MAGIC:
        return None
    texts = _texts(data, words[WORD_TEXTS])
    channels = {}
    for index in range(min(words[WORD_CHANNELS], CHANNELS)):
        peer, tag, is_send, count = CHANNEL.unpack_from(data, CHANNELS_AT + index * CHANNEL.size)
        channels[peer, tag, bool(is_send)] = count
    return Recording(
        rank=words[WORD_RANK],
        clock=words[WORD_CLOCK],
        epoch=words[WORD_EPOCH],
        begun=words[WORD_BEGUN],
        moved=words[WORD_MOVED],
        steps=words[WORD_STEPS],
        timed=words[WORD_TIMED],
        slowest=words[WORD_SLOWEST],
        passes=words[WORD_PASSES],
        phase=_text(texts, words[WORD_PHASE]),
        phase_since=words[WORD_PHASE_SINCE],
        channels=channels,
        operations=_operations(data, texts),
    )


def _operations(data: bytes, texts: list[str]) -> tuple[Operation, ...]:
    found = []
    for index in range(OPERATIONS):
        number, begun, ended, nbytes, message, step, peer, tag, bucket, verb, name, place, _ = OPERATION.unpack_from(
            data, RING_AT + index * OPERATION.size
        )
        if number:
            texted = _text(texts, name), _text(texts, place)
            known = verb if verb < len(VERBS) else 0  # a rank can write any number into its recording
            found.append(Operation(number, begun, ended, nbytes, message, step, peer, tag, bucket, known, *texted))
    return tuple(sorted(found, key=lambda operation: operation.number))


def _texts(data: bytes, used: int) -> list[str]:
    """Read the table of texts; text 0 is the empty one."""
    area, texts = data[TEXTS_AT : TEXTS_AT + min(used, TEXT_BYTES)], [""]
    return texts + [text.decode("utf-8", "replace") for text in area.split(b"\0")[:-1]]


def _text(texts: list[str], number: int) -> str:
    return texts[number] if 0 <= number < len(texts) else ""
