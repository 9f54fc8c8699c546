"""The messages of the calls that a rank answers beside the streams of tensors: a header, a name, and a piece of a vector.

Like frames, they are no protobuf messages; `docs/reference/peer.proto` documents both. Every one is parsed here, before anything
else looks at it.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from crc32c import crc32c

from ttlaunch.runtime.comm.grpc.frames import CHUNK_BYTES, EMPTY, BadFrameError
from ttlaunch.runtime.comm.grpc.vectors import Key

MOST_UNARY_BYTES = 4 * 2**20
"""The most bytes of a vector that one answer holds; more come as a stream."""

MOST_NAME_BYTES = 255

_MAGIC = 0x7475
_FIELDS = struct.Struct("<HBBIIQIIQQQQ")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
MOST_HEADER_BYTES = _HEADER_BYTES + MOST_NAME_BYTES


class PieceKind(IntEnum):
    """What a message is for.

    Attributes:
        WHICH: It asks for a vector of exactly this step.
        NEWEST: It asks for the newest vector, of this step or a later one.
        PIECE: A piece of a vector.
        RECEIVED: The vector has been received.
        DUPLICATE: The vector had been received before.
        BEAT: The sender lives.
    """

    WHICH = 1
    NEWEST = 2
    PIECE = 3
    RECEIVED = 4
    DUPLICATE = 5
    BEAT = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """One message.

    Attributes:
        incarnation: The life of the worker that sends it.
        offset: Where in the bytes of the key's values the payload begins.
        total: How many bytes these have.
        payload: Empty except for PIECE.
    """

    kind: PieceKind
    key: Key
    incarnation: int = 0
    offset: int = 0
    total: int = 0
    payload: memoryview = EMPTY


_KINDS = frozenset(int(kind) for kind in PieceKind)


def pack_piece(piece: Piece) -> bytes:
    """Return a message's bytes.

    Cost: one copy of the payload.

    Raises:
        ValueError: A name is longer than `MOST_NAME_BYTES`, or a number does not fit its field.
    """
    key, name = piece.key, piece.key.name.encode()
    try:
        fields = _FIELDS.pack(
            _MAGIC,
            piece.kind,
            len(name),
            key.epoch,
            piece.incarnation,
            key.step,
            key.start,
            key.size,
            key.first,
            key.last,
            piece.offset,
            piece.total,
        )
    except struct.error as error:
        raise ValueError(f"{key} cannot be sent: {error}") from None
    checksum = crc32c(piece.payload, crc32c(name, crc32c(fields)))
    return b"".join((fields, _CHECKSUM.pack(checksum), name, piece.payload))


def pieces_of(key: Key, contents: Sequence[memoryview], *, incarnation: int) -> Iterator[bytes]:
    """Return the messages that carry a vector, at least one; its bytes lie in one place or in several, one after the other."""
    total, begin = sum(map(len, contents)), 0
    if not total:
        yield pack_piece(Piece(PieceKind.PIECE, key, incarnation))
    for content in contents:
        for offset in range(0, len(content), CHUNK_BYTES):
            payload = content[offset : offset + CHUNK_BYTES]
            yield pack_piece(Piece(PieceKind.PIECE, key, incarnation, begin + offset, total, payload))
        begin += len(content)


def parse_piece(data: bytes, *, most_bytes: int = CHUNK_BYTES) -> Piece:
    """Return the message that these bytes are; its payload refers to them.

    Args:
        most_bytes: The longest payload.

    Raises:
        BadFrameError: They are none, or are damaged.
    """
    if not _HEADER_BYTES <= len(data) <= MOST_HEADER_BYTES + most_bytes:
        raise BadFrameError(f"a message of {len(data)} bytes")
    magic, kind, name_bytes, epoch, incarnation, step, start, size, first, last, offset, total = _FIELDS.unpack_from(
        data
    )
    if magic != _MAGIC or kind not in _KINDS:
        raise BadFrameError("a message whose header is none of this protocol")
    view = memoryview(data)
    (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    if checksum != crc32c(view[_HEADER_BYTES:], crc32c(view[: _FIELDS.size])):
        raise BadFrameError("a message whose checksum does not match its content")
    payload = view[_HEADER_BYTES + name_bytes :]
    if len(data) < _HEADER_BYTES + name_bytes or last < first or (payload and kind != PieceKind.PIECE):
        raise BadFrameError("a message that contradicts itself")
    if offset + len(payload) > total and kind == PieceKind.PIECE:
        raise BadFrameError("a piece that reaches beyond the end of its vector")
    try:
        name = str(view[_HEADER_BYTES : _HEADER_BYTES + name_bytes], "utf-8")
    except UnicodeDecodeError:
        raise BadFrameError("a name that is no text") from None
    return Piece(PieceKind(kind), Key(name, step, first, last, start, size, epoch), incarnation, offset, total, payload)
