"""Tensors whose parts lie in several files, as tensor-parallel ranks leave them, put together again without torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ttlaunch.running.checkpoints.tensor_file import Extent, StoredTensor
from ttlaunch.stored_parts import Part, parse_part


@dataclass(frozen=True)
class JoinedTensor:
    """A whole tensor of several stored parts; see `StoredTensor`.

    Attributes:
        path: Of one of its files.
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
    """Place of each run in the whole tensor, counted in values, and where its bytes are."""
    value_bytes, *outer = stored.size // part.size, *part.places[:-1]
    last, row = part.places[-1], part.shape[-1]
    for number, indices in enumerate(product(*outer)):
        place = 0
        for index, length in zip(indices, part.shape, strict=False):
            place = place * length + index
        start = stored.start + number * len(last) * value_bytes
        yield place * row + last.start, Extent(stored.path, start, start + len(last) * value_bytes)
