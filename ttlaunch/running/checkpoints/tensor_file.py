"""Safetensors files without torch: what is in one, and a new one from parts of others, byte for byte.

The format: 8 bytes that say how long the header is, the header as JSON (name to dtype, shape, place), the tensors.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ttlaunch.errors import TtlaunchError
from ttlaunch.records.parser import load

_LARGEST_HEADER = 100_000_000
_SMALLEST_HEADER = len(b"{}")


class TensorFileError(TtlaunchError):
    """A file is no safetensors file."""


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
