"""The frames that ranks exchange over gRPC: a header of fixed size, then at most 1 MiB of a tensor.

A frame is no protobuf message: its payload would be copied twice more. `docs/reference/peer.proto` documents calls and
frames. Every frame is parsed here, before anything else looks at it.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from math import prod

import torch
from crc32c import crc32c

from ttlaunch.runtime.comm.protocol import DTYPES, MAX_DIMS

CHUNK_BYTES = 2**20
"""The most bytes of a tensor in one frame. Larger ones are not faster, and a frame is in memory twice."""

_MAGIC = 0x7474
_FIELDS = struct.Struct(f"<HBBB3xIIIQ{MAX_DIMS}qQQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
MOST_BYTES = HEADER_BYTES + CHUNK_BYTES
_ITEM_BYTES = tuple(torch.empty(0, dtype=dtype).element_size() for dtype in DTYPES)


Parts = tuple[bytes, memoryview]
"""A frame: the bytes of its header, and its payload, which may still be a tensor's memory."""


class BadFrameError(ValueError):
    """A frame that no rank of ttlaunch sends; the text says what is wrong with it."""


class Kind(IntEnum):
    """What a frame is for.

    Attributes:
        DATA: A piece of a message.
        ANNOUNCE: A message waits for a grant.
        GRANT: The receiver has room for a message.
        CREDIT: The receiver has taken bytes that came without a grant.
    """

    DATA = 1
    ANNOUNCE = 2
    GRANT = 3
    CREDIT = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """What a message holds.

    Attributes:
        dtype: The index in `DTYPES`.
        total: The bytes of the tensor.
    """

    dtype: int
    shape: tuple[int, ...]
    total: int

    def __str__(self) -> str:
        return f"{str(DTYPES[self.dtype]).removeprefix('torch.')} of shape {self.shape}"


_KINDS = frozenset(int(kind) for kind in Kind)
NOTHING = Layout(0, (0,), 0)
"""The layout in frames that belong to no tensor."""

EMPTY = memoryview(b"")
"""The payload of frames that carry no piece of a tensor."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame.

    Attributes:
        tag, number: The message: its tag, and how many of that tag the sender has sent to this receiver before.
        epoch, incarnation: The world and the life of the rank in which the frame was sent.
        layout: The message's tensor.
        offset: Where in the tensor the payload begins, in bytes; for CREDIT, the number of bytes.
        payload: A piece of the tensor; empty except for DATA.
    """

    kind: Kind
    tag: int
    number: int
    epoch: int = 0
    incarnation: int = 0
    layout: Layout = NOTHING
    offset: int = 0
    payload: memoryview = EMPTY


def pack(frame: Frame) -> bytes:
    """Return a frame's bytes.

    Cost: one copy of the payload.
    """
    return b"".join(parts_of(frame))


def parts_of(frame: Frame) -> Parts:
    """Return the bytes of a frame's header, and its payload where it is."""
    shape = frame.layout.shape
    fields = _FIELDS.pack(
        _MAGIC,
        frame.kind,
        frame.layout.dtype,
        len(shape),
        frame.tag,
        frame.epoch,
        frame.incarnation,
        frame.number,
        *shape,
        *(0,) * (MAX_DIMS - len(shape)),
        frame.offset,
        frame.layout.total,
    )
    checksum = crc32c(frame.payload, crc32c(fields))
    return b"".join((fields, _CHECKSUM.pack(checksum))), frame.payload


def parse(data: bytes | memoryview) -> Frame:
    """Return the frame that these bytes are; its payload refers to them.

    Raises:
        BadFrameError: They are none, or are damaged.
    """
    if not HEADER_BYTES <= len(data) <= MOST_BYTES:
        raise BadFrameError(f"a frame of {len(data)} bytes; frames have {HEADER_BYTES} to {MOST_BYTES}")
    magic, kind, dtype, dims, tag, epoch, incarnation, number, *rest = _FIELDS.unpack_from(data)
    if magic != _MAGIC or kind not in _KINDS or dtype >= len(DTYPES) or dims > MAX_DIMS:
        raise BadFrameError("a frame whose header is none of this protocol")
    *padded, offset, total = rest
    payload = memoryview(data)[HEADER_BYTES:]
    (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    if checksum != crc32c(payload, crc32c(memoryview(data)[: _FIELDS.size])):
        raise BadFrameError("a frame whose checksum does not match its content")
    shape = tuple(padded[:dims])
    if min(shape, default=0) < 0 or any(padded[dims:]) or prod(shape) * _ITEM_BYTES[dtype] != total:
        raise BadFrameError(f"a frame of a tensor of shape {shape} and {total} bytes")
    if kind == Kind.DATA:
        if offset + len(payload) > total:
            raise BadFrameError("a frame that reaches beyond the end of its tensor")
    elif payload:
        raise BadFrameError("a frame with a payload where none belongs")
    return Frame(Kind(kind), tag, number, epoch, incarnation, Layout(dtype, shape, total), offset, payload)
