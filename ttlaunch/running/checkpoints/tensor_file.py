"""Read safetensors files without torch, write a new one from parts of others, and join tensors that lie in several files.

The format: 8 bytes with the length of the header, the header as JSON (name to dtype, shape, place), the tensors.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ttlaunch.errors import TtlaunchError
from ttlaunch.records.parser import load
from ttlaunch.stored_parts import Part, parse_part

_LARGEST_HEADER = 100_000_000
_SMALLEST_HEADER = len(b"{}")


class TensorFileError(TtlaunchError):
    """The content of a file is not in the safetensors format."""


@dataclass(frozen=True)
class Extent:
    """Bytes `start` to `end` of the file at `path`."""

    path: Path
    start: int
    end: int


class FiledTensor(Protocol):
    """A tensor in files."""

    @property
    def path(self) -> Path:
        """The file that it is in, or one of them."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int:
        """Bytes."""

    def extents(self) -> list[Extent]:
        """Where its bytes are, in their order."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its bytes are `start` to `end` of the file at `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start

    def extents(self) -> list[Extent]:
        """Where its bytes are."""
        return [Extent(self.path, self.start, self.end)]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name, in the order of their places.

    Raises:
        OSError: It cannot be read.
        TensorFileError: It is no safetensors file, or a part of it is missing.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not _SMALLEST_HEADER <= length <= min(_LARGEST_HEADER, size - 8):
            raise TensorFileError("it is no safetensors file")
        text = file.read(length)
    try:
        content: dict[str, Any] = load(text)  # a `BadRecord` has no items, and is refused with the rest
        base = 8 + length
        tensors = {name: _stored(path, entry, base) for name, entry in content.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorFileError("its header is not that of a safetensors file") from error
    end = max((tensor.end for tensor in tensors.values()), default=base)
    if end != size:
        raise TensorFileError(f"it has {size} bytes, its header says {end}")
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def write_tensors(path: Path, tensors: Mapping[str, FiledTensor]) -> None:
    """Write a file of tensors that lie in other files; it appears whole or not at all.

    Raises:
        OSError: A file cannot be read, or this one not be written.
    """
    header, place = {}, 0
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
                for piece in read_bytes(tensor):
                    file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _stored(path: Path, entry: Mapping[str, Any], base: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    return StoredTensor(path, str(entry["dtype"]), tuple(map(int, entry["shape"])), base + int(start), base + int(end))


def read_bytes(tensor: FiledTensor) -> Iterator[bytes]:
    """The values of a tensor, piece by piece.

    Raises:
        OSError: A file cannot be read, or ends too early.
    """
    with ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for extent in tensor.extents():
            if extent.path not in files:
                files[extent.path] = stack.enter_context(extent.path.open("rb"))
            source = files[extent.path]
            source.seek(extent.start)
            left = extent.end - extent.start
            while left:
                piece = source.read(min(left, 2**24))
                if not piece:
                    raise OSError(f"{extent.path} ends too early")
                yield piece
                left -= len(piece)


@dataclass(frozen=True)
class JoinedTensor:
    """A whole tensor of several stored parts, as tensor-parallel ranks leave them.

    Attributes:
        path: The path of one of its files.
        parts: Each with where it lies; together they have every value once.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Part, StoredTensor], ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(stored.size for _, stored in self.parts)

    def extents(self) -> list[Extent]:
        """Where its bytes are, in their order: each run of values that one part has, up to a row of it."""
        runs = [run for part, stored in self.parts for run in _runs(part, stored)]
        return [extent for _, extent in sorted(runs, key=lambda run: run[0])]


def join_parts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | JoinedTensor]:
    """Whole tensors by name; parts stay under their own names where some of the whole is missing."""
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
    values = 1
    for length in first.shape:
        values *= length
    agree = all((part.shape, other.dtype) == (first.shape, stored.dtype) for part, other in parts.items())
    if not agree or sum(part.size for part in parts) != values:
        return None
    return JoinedTensor(stored.path, stored.dtype, first.shape, tuple(parts.items()))


def _runs(part: Part, stored: StoredTensor) -> Iterator[tuple[int, Extent]]:
    """For each run of values of a part: its place in the whole tensor, counted in values, and where its bytes are."""
    value_bytes, *outer = stored.size // part.size, *part.places[:-1]
    last, row = part.places[-1], part.shape[-1]
    for number, indices in enumerate(product(*outer)):
        place = 0
        for index, length in zip(indices, part.shape, strict=False):
            place = place * length + index
        start = stored.start + number * len(last) * value_bytes
        yield place * row + last.start, Extent(stored.path, start, start + len(last) * value_bytes)
