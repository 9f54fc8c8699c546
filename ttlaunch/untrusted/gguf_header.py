"""Read the header of a GGUF: its values, its texts and lists, and where each tensor is.

Every count, length, offset and size that the file states is compared with the bytes that it has before anything is made
of it. The `gguf` package loops over counts from the file and looks at each text through numpy, which takes longer than a
limited child has; it computes the values of tensors (`gguf_values.py`). Standard library only.

Source: the ggml project's specification of the format, `docs/gguf.md`, versions 2 and 3.
"""

from __future__ import annotations

import json
import math
import os
import struct
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, BinaryIO

from ttlaunch.untrusted.child import UntrustedError

LARGEST_HEADER = 64 * 2**20
"""The most bytes before the first tensor."""
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
_LARGEST_ALIGNMENT = 2**20
_MOST_VALUES = 2**62
_LONGEST_NAME = 1024
_TEXT, _LIST = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""By the number of a type of values its letter in `struct`."""
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20)}
"""By type the values and the bytes of a block."""
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"}
_TYPES |= {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
_TYPES |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_TYPES |= {29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}
_SHOWN = 60
_MOST_KINDS = 5


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is; its shape has the slowest dimension first, as in other formats."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    end: int


@dataclass
class Header:
    """What a file says before its tensors.

    Attributes:
        values: Numbers, truth values, texts, and lists of them, by key.
        tensors: In the order in which they are described.
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: list[GgufTensor] = field(default_factory=list)


def answers(requests: Iterator[dict[str, object]], file: BinaryIO) -> Iterator[bytes]:
    """Answer with the numbers and texts of a header, the lengths of its lists, and its tensors, as JSON."""
    next(requests, None)
    header = read_header(file)
    plain = {key: _plain(value) for key, value in header.values.items() if not isinstance(value, (list, array))}
    lists = {key: len(value) for key, value in header.values.items() if key not in plain}
    tensors = [[one.name, list(one.shape), one.kind, one.start, one.end] for one in header.tensors]
    yield json.dumps({"values": plain, "lists": lists, "tensors": tensors}).encode()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: what is no finite number becomes a text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_header(file: BinaryIO) -> Header:
    """Read the header of an open file.

    Raises:
        UntrustedError: The file is no GGUF, or its header does not describe its content.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    return parse_header(file.read(min(size, LARGEST_HEADER)), size)


def parse_header(data: bytes, size: int) -> Header:
    """Read a header.

    Args:
        data: The beginning of a file, of `LARGEST_HEADER` bytes at most.
        size: The bytes that the whole file has.

    Raises:
        UntrustedError: As `read_header`.
    """
    cursor = _Cursor(data, size)
    if cursor.take(len(_MAGIC)) != _MAGIC:
        raise UntrustedError("it is no GGUF file")
    version = cursor.number("I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        said = "its numbers are big-endian" if swapped else f"it is of version {version} of the format"
        raise UntrustedError(f"{said}, and only little-endian files of version 2 and 3 are read")
    tensors, values = cursor.number("Q"), cursor.number("Q")
    cursor.check_count(tensors, least=8 + 4 + 4 + 8, what="tensors")
    cursor.check_count(values, least=8 + 4 + 1, what="values")
    header = Header()
    for _ in range(values):
        key = cursor.name("a key")
        if key in header.values:
            raise UntrustedError(f"the key `{_shown(key)}` occurs twice")
        header.values[key] = cursor.value(key)
    infos = [_info(cursor) for _ in range(tensors)]
    alignment = header.values.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise UntrustedError(f"`general.alignment` is {_shown(repr(alignment))}, and no power of two up to 2**20")
    base = -(-cursor.place // alignment) * alignment
    header.tensors = list(_tensors(infos, base=base, alignment=alignment))
    _check_places(header.tensors, base=base, alignment=alignment, size=size)
    return header


class _Cursor:
    """A place in the bytes of a header."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size, self.place = data, size, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self.place + count
        if end > len(self._data):
            if end > self._size:
                left = len(self._data) - self.place
                raise UntrustedError(f"at byte {self.place} it says that {count} bytes follow, and {left} do")
            raise UntrustedError(f"its header has more than {LARGEST_HEADER >> 20} MiB")
        piece = self._data[self.place : end]
        self.place = end
        return piece

    def number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def check_count(self, count: int, *, least: int, what: str) -> None:
        """Check that the file has room for `count` things of at least `least` bytes each."""
        if count * least > self._size - self.place:
            raise UntrustedError(
                f"it says that it has {count} {what}, each of at least {least} bytes, and {self._size - self.place} bytes follow"
            )

    def text(self, what: str) -> str:
        length = self.number("Q")
        self.check_count(length, least=1, what=f"bytes of {what}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise UntrustedError(f"{what} at byte {self.place - length} is not UTF-8") from None

    def name(self, what: str) -> str:
        name = self.text(what)
        if len(name) > _LONGEST_NAME:
            raise UntrustedError(f"{what} has {len(name)} characters, more than {_LONGEST_NAME}")
        return name

    def value(self, key: str) -> Any:
        """Return a number, a truth value, a text or a list."""
        kind, what = self.number("I"), f"`{_shown(key)}`"
        if kind == _TEXT:
            return self.text(what)
        if kind != _LIST:
            return self._numbers(kind, 1, what)[0]
        kind, count = self.number("I"), self.number("Q")
        if kind == _TEXT:
            self.check_count(count, least=8, what=f"texts of {what}")
            return [self.text(what) for _ in range(count)]
        if kind == _LIST:
            raise UntrustedError(f"{what} is a list of lists, which no key has")
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> Any:
        if kind not in _NUMBERS:
            raise UntrustedError(f"{what} is of the unknown type {kind}")
        letter = _NUMBERS[kind]
        self.check_count(count, least=struct.calcsize("<" + letter), what=f"numbers of {what}")
        data = self.take(count * struct.calcsize("<" + letter))
        if letter == "?":
            if data.strip(b"\0\1"):
                raise UntrustedError(f"{what} is neither true nor false")
            return [bool(byte) for byte in data]
        return array(letter, data)


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type and offset of a tensor as the file says them."""
    name = cursor.name("the name of a tensor")
    dimensions = cursor.number("I")
    if dimensions > _MOST_DIMENSIONS:
        raise UntrustedError(f"tensor `{_shown(name)}` has {dimensions} dimensions, more than {_MOST_DIMENSIONS}")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _tensors(infos: list[tuple[str, tuple[int, ...], int, int]], *, base: int, alignment: int) -> Iterator[GgufTensor]:
    unread = Counter(_type(kind) for _, _, kind, _ in infos if _type(kind) not in BLOCKS)
    if unread:
        said = ", ".join(f"{count} of type {kind}" for kind, count in sorted(unread.items())[:_MOST_KINDS])
        raise UntrustedError(f"it has tensors of other types than {', '.join(BLOCKS)}: {said}")
    for name, shape, number, offset in infos:
        values, (block, block_bytes) = math.prod(shape), BLOCKS[_type(number)]
        if not shape or not 0 < values < _MOST_VALUES:
            raise UntrustedError(f"tensor `{_shown(name)}` has the shape {list(shape)}, which no tensor has")
        if shape[-1] % block:
            raise UntrustedError(
                f"tensor `{_shown(name)}` has rows of {shape[-1]} values, and {_type(number)} has blocks of {block}"
            )
        if offset % alignment:
            raise UntrustedError(f"tensor `{_shown(name)}` is at {offset}, which is no multiple of {alignment}")
        start = base + offset
        yield GgufTensor(name, shape, _type(number), start, start + values // block * block_bytes)


def _check_places(tensors: list[GgufTensor], *, base: int, alignment: int, size: int) -> None:
    """Check that the tensors fill the file in any order, without overlap, and without a gap that alignment does not explain."""
    names = Counter(one.name for one in tensors)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise UntrustedError(f"tensor `{_shown(twice)}` occurs twice")
    sorted_ = sorted(tensors, key=lambda one: one.start)
    places = [("the header", base), *((f"tensor `{_shown(one.name)}`", one.end) for one in sorted_)]
    for ((before, end), (after, _)), one in zip(pairwise(places), sorted_, strict=True):
        if one.start < end:
            raise UntrustedError(f"{after} overlaps {before} by {end - one.start} bytes")
        if one.start - end >= alignment:
            raise UntrustedError(f"{one.start - end} bytes between {before} and {after} belong to no tensor")
    last, end = places[-1]
    if tensors and end > size:
        raise UntrustedError(f"{last} ends at byte {end}, and the file has {size}")
    if size - end >= alignment:
        raise UntrustedError(f"{size - end} bytes behind {last} belong to no tensor")


def _type(number: int) -> str:
    return _TYPES.get(number, f"number {number}")


def _shown(name: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in name[:_SHOWN])
