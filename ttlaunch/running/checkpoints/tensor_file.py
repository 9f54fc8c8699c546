"""Read safetensors files without torch, write a file from tensors of others, and join tensors whose parts are in several files.

The format: 8 bytes with the length of the header; the header as JSON (by name: dtype, shape, place); the bytes of the
tensors. A file may come from anybody, so it is refused unless its tensors fill it without a gap or an overlap.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, runtime_checkable

from ttlaunch.errors import TtlaunchError
from ttlaunch.records.parser import BadRecord, Count, Size, Word, load, parse, record, shown
from ttlaunch.records.regular_files import open_regular
from ttlaunch.stored_parts import Part, is_complete, parse_part

_LARGEST_HEADER = 100_000_000
_SMALLEST_HEADER = len(b"{}")
_METADATA = "__metadata__"
_PIECE = 1 << 20
"""Bytes of a file that are in memory at a time. Larger pieces are no faster, and the memory of a matrix that is turned round comes on top."""
_MOST_DIMENSIONS = 64
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32}
_BITS |= {"F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64}
"""Bits of a value by the type's name in a header."""
_UNITS: dict[int, Literal["B", "H", "I", "Q"]] = {8: "B", 16: "H", 32: "I", 64: "Q"}
"""By the bits of a value, an integer of the same size in the letters of `struct`."""


class TensorFileError(TtlaunchError):
    """The content of a file is not in the safetensors format."""


@dataclass(frozen=True)
class Extent:
    """The bytes from `start` up to, but not including, `end` of the file at `path`."""

    path: Path
    start: int
    end: int


class DescribedTensor(Protocol):
    """What is known of a tensor without its values."""

    @property
    def path(self) -> Path:
        """The file, or one of the files, that has the values or what they are computed from."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int:
        """The number of bytes."""


class FiledTensor(DescribedTensor, Protocol):
    """A tensor that is stored in one file or several."""

    def extents(self) -> list[Extent]:
        """Return the parts of files that together are the tensor's bytes, in their order."""


@runtime_checkable
class ComputedTensor(DescribedTensor, Protocol):
    """A tensor whose bytes are not those of a file, but computed from them."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the tensor, in any pieces."""


AnyTensor = FiledTensor | ComputedTensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose bytes are those from `start` up to, but not including, `end` of the file at `path`, which calls it `name`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    name: str = ""

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.end - self.start

    def extents(self) -> list[Extent]:
        """Return the one part of the file that has the tensor's bytes."""
        return [Extent(self.path, self.start, self.end)]


@record
class _Entry:
    """The entry of a header about a tensor."""

    dtype: Word
    shape: tuple[Count, ...]
    data_offsets: tuple[Size, Size]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, in the order in which the file contains them.

    Raises:
        OSError: The file cannot be read, or is no regular file.
        TensorFileError: The file is no safetensors file, or its header does not describe its content.
    """
    with open_regular(path) as file:
        return parse_header(file, path)


def parse_header(file: BinaryIO, path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of an open file, as `read_header` does; the file must be at its beginning.

    Raises:
        OSError: The file cannot be read.
        TensorFileError: The file is no safetensors file, or its header does not describe its content.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not _SMALLEST_HEADER <= length <= min(_LARGEST_HEADER, size - 8):
        raise TensorFileError("it is no safetensors file")
    content, base = load(file.read(length)), 8 + length
    if not isinstance(content, dict) or not _is_metadata(content.pop(_METADATA, {})):
        raise TensorFileError("its header is not that of a safetensors file")
    stored = [_stored(path, name, entry, base=base) for name, entry in content.items()]
    tensors = dict(sorted(stored, key=lambda item: (item[1].start, item[1].end)))
    end = max((tensor.end for tensor in tensors.values()), default=base)
    if end != size:
        raise TensorFileError(f"it has {size} bytes, its header says {end}")
    _check_places(tensors, base=base)
    return tensors


def _is_metadata(content: Any) -> bool:
    return isinstance(content, dict) and all(isinstance(value, str) for value in content.values())


def _check_places(tensors: Mapping[str, StoredTensor], *, base: int) -> None:
    """Check that sorted tensors follow each other without gap or overlap; the caller has checked where the last one ends.

    Raises:
        TensorFileError: Two tensors overlap, or some bytes belong to no tensor.
    """
    places = [("the header", base), *((f"tensor {shown(name)}", one.end) for name, one in tensors.items())]
    starts = [one.start for one in tensors.values()]
    for ((before, end), (after, _)), start in zip(pairwise(places), starts, strict=True):
        if start < end:
            raise TensorFileError(f"{after} overlaps {before} by {end - start} bytes")
        if start > end:
            raise TensorFileError(f"{start - end} bytes between {before} and {after} belong to no tensor")


def integer_type(dtype: str) -> Literal["B", "H", "I", "Q"]:
    """Return the letter of `struct` for an integer of the size of a value.

    Raises:
        KeyError: A value of the type takes no whole bytes.
    """
    return _UNITS[_BITS[dtype]]


def pieces_of(tensor: AnyTensor) -> Iterator[bytes]:
    """Return the bytes of a tensor, stored or computed, piece by piece.

    Raises:
        OSError: A file cannot be read, or ends too early.
    """
    return tensor.pieces() if isinstance(tensor, ComputedTensor) else read_bytes(tensor)


def write_tensors(
    path: Path,
    tensors: Mapping[str, AnyTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    wrote: Callable[[int], object] = lambda _: None,
) -> None:
    """Write a new file with tensors of other files; the file appears complete or not at all.

    Args:
        path: The file.
        tensors: By name, in the order in which they are written.
        metadata: Further texts of the header.
        wrote: Called with the number of bytes of each piece that was written.

    Cost: a piece of a tensor is in memory at a time, of a transposed one all of it.

    Raises:
        OSError: A file of a tensor cannot be read, or the new file cannot be written.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    place = 0
    for name, tensor in tensors.items():
        end = place + tensor.size
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                for piece in pieces_of(tensor):
                    file.write(piece)
                    wrote(len(piece))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:  # also an interruption
        unfinished.unlink(missing_ok=True)
        raise


def _stored(path: Path, name: str, content: object, *, base: int) -> tuple[str, StoredTensor]:
    entry = parse(_Entry, content)
    if isinstance(entry, BadRecord):
        raise TensorFileError(f"tensor {shown(name)}: {entry.reason}")
    (start, end), shape = entry.data_offsets, entry.shape
    if entry.dtype not in _BITS:
        raise TensorFileError(f"tensor {shown(name)} has the unknown type {shown(entry.dtype)}")
    if len(shape) > _MOST_DIMENSIONS:
        raise TensorFileError(f"tensor {shown(name)} has {len(shape)} dimensions, more than {_MOST_DIMENSIONS}")
    if start > end:
        raise TensorFileError(f"tensor {shown(name)} ends at byte {end}, before its beginning at byte {start}")
    bits = math.prod(shape) * _BITS[entry.dtype]
    if bits != 8 * (end - start):
        raise TensorFileError(
            f"tensor {shown(name)} has {end - start} bytes, its shape and type {entry.dtype} take {bits / 8:,.10g}"
        )
    part = parse_part(name)
    if part is not None and shape != tuple(len(at) for at in part.places):
        raise TensorFileError(f"tensor {shown(name)} is of another shape than its name says")
    return name, StoredTensor(path, entry.dtype, shape, base + start, base + end, name)


def read_bytes(tensor: FiledTensor) -> Iterator[bytes]:
    """Yield the bytes of a tensor, piece by piece.

    Raises:
        OSError: A file cannot be read, or ends too early.
    """
    with ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for extent in tensor.extents():
            if extent.path not in files:
                files[extent.path] = stack.enter_context(open_regular(extent.path))
            source = files[extent.path]
            source.seek(extent.start)
            left = extent.end - extent.start
            while left:
                piece = source.read(min(left, _PIECE))
                if not piece:
                    raise OSError(f"{extent.path} ends too early")
                yield piece
                left -= len(piece)


@dataclass(frozen=True)
class JoinedTensor:
    """A whole tensor whose parts are stored separately, as tensor-parallel ranks write them.

    Attributes:
        path: The path of one of the tensor's files.
        parts: The parts, each with its stored tensor; together they have every value exactly once.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Part, StoredTensor], ...]

    @property
    def size(self) -> int:
        """The number of bytes."""
        return sum(stored.size for _, stored in self.parts)

    def extents(self) -> list[Extent]:
        """Return the parts of files that together are the tensor's bytes, in their order; each is within one row."""
        runs = [run for part, stored in self.parts for run in _runs(part, stored)]
        return [extent for _, extent in sorted(runs, key=lambda run: run[0])]


def join_parts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | JoinedTensor]:
    """Join stored parts to whole tensors, by name; if a part is missing, the others keep the names of parts."""
    found: dict[str, StoredTensor | JoinedTensor] = {}
    parts: dict[str, dict[Part, StoredTensor]] = {}
    for name, tensor in tensors.items():
        part = parse_part(name)
        if part is None:
            found[name] = tensor
        else:
            parts.setdefault(part.name, {})[part] = tensor
    for name, its in parts.items():
        joined = _joined(its)
        found |= {name: joined} if joined else {str(part): stored for part, stored in its.items()}
    return dict(sorted(found.items()))


def _joined(parts: Mapping[Part, StoredTensor]) -> JoinedTensor | None:
    first, stored = next(iter(parts.items()))
    agree = all((part.shape, other.dtype) == (first.shape, stored.dtype) for part, other in parts.items())
    if not agree or not is_complete(parts):
        return None
    return JoinedTensor(stored.path, stored.dtype, first.shape, tuple(item for item in parts.items() if item[0].size))


def _runs(part: Part, stored: StoredTensor) -> Iterator[tuple[int, Extent]]:
    """Yield each run of consecutive values of a part: its place in the whole tensor, counted in values, and its bytes."""
    value_bytes, *outer = stored.size // part.size, *part.places[:-1]
    last, row = part.places[-1], part.shape[-1]
    for number, indices in enumerate(product(*outer)):
        place = 0
        for index, length in zip(indices, part.shape, strict=False):
            place = place * length + index
        start = stored.start + number * len(last) * value_bytes
        yield place * row + last.start, Extent(stored.path, start, start + len(last) * value_bytes)
