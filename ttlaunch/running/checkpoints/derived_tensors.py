"""Tensors that are made of stored ones: turned, some rows of one, several behind each other. Nothing is read before it is wanted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttlaunch.running.checkpoints.tensor_file import AnyTensor, Extent, FiledTensor, integer_type, pieces_of


@dataclass(frozen=True)
class _Derived:
    """What a tensor has from the one that it is made of."""

    source: AnyTensor

    @property
    def path(self) -> Path:
        """The file, or one of the files, of the values."""
        return self.source.path

    @property
    def dtype(self) -> str:
        """The type's name in a header."""
        return self.source.dtype


@dataclass(frozen=True)
class Rows(_Derived):
    """Some rows of a stored matrix, or all of them in another order.

    Attributes:
        source: The matrix, each row of which is stored without a gap.
        rows: For each row the number that it has in the matrix.
    """

    source: FiledTensor
    rows: Sequence[int]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.source.shape[1:])

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._row_bytes * len(self.rows)

    @property
    def _row_bytes(self) -> int:
        return self.source.size // self.source.shape[0]

    def extents(self) -> list[Extent]:
        """Return the parts of files that have the rows, in their order; rows that follow each other are one part of a file."""
        found: list[Extent] = []
        for first, last in _runs(self.rows):
            found += _within(self.source.extents(), self._row_bytes * first, self._row_bytes * last)
        return found


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first row, and the one after the last, of each longest run of rows that follow each other."""
    if isinstance(rows, range) and rows.step == 1:  # a matrix may have any number of rows
        yield rows.start, rows.stop
        return
    start = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            yield rows[start], rows[place - 1] + 1
            start = place


def _within(extents: list[Extent], first: int, last: int) -> Iterator[Extent]:
    """Yield what stores the bytes from `first` up to, but not including, `last` of a tensor."""
    place = 0
    for extent in extents:
        start, end = max(first, place), min(last, place + extent.end - extent.start)
        if start < end:
            yield Extent(extent.path, extent.start + start - place, extent.start + end - place)
        place += extent.end - extent.start


@dataclass(frozen=True)
class StackedRows:
    """Matrices of equal width and type, one behind the other.

    Attributes:
        parts: The matrices, from the first rows to the last.
    """

    parts: tuple[AnyTensor, ...]

    @property
    def path(self) -> Path:
        """The file, or one of the files, of the first matrix."""
        return self.parts[0].path

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def size(self) -> int:
        """The number of bytes."""
        return sum(part.size for part in self.parts)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of one matrix after the other.

        Raises:
            OSError: A file cannot be read, or ends too early.
        """
        for part in self.parts:
            yield from pieces_of(part)


@dataclass(frozen=True)
class Transposed(_Derived):
    """A matrix with rows and columns exchanged.

    Attributes:
        source: The matrix; a value of it takes whole bytes.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.source.shape
        return columns, rows

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.source.size

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of each row. Cost: the matrix is in memory once.

        Raises:
            OSError: A file cannot be read, or ends too early.
        """
        unit, (rows, columns) = integer_type(self.dtype), self.source.shape
        if not rows * columns:
            return
        stored = bytearray(self.source.size)
        place = 0
        for piece in pieces_of(self.source):
            stored[place : place + len(piece)] = piece
            place += len(piece)
        values = memoryview(stored).cast(unit)
        for column in range(columns):
            yield values[column::columns].tobytes()


def transposed(tensor: AnyTensor) -> AnyTensor:
    """Return a matrix with rows and columns exchanged; one that was exchanged already as it was before."""
    return tensor.source if isinstance(tensor, Transposed) else Transposed(tensor)
