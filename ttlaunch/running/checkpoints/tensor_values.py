"""Read the values of stored tensors without torch: what they are like in one tensor, and how they differ in two.

A tensor is read in pieces, so one of any size takes the same memory. Pieces with equal bytes are not looked at any closer.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from ttlaunch.running.checkpoints.tensor_file import FiledTensor, read_bytes

_LETTERS = {"BOOL": "B", "U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i", "U64": "Q", "I64": "q"}
_LETTERS |= {"F16": "e", "BF16": "f", "F32": "f", "F64": "d"}
"""By the name of a type, the letter of `struct` that reads its values; those of BF16 are widened to F32 first."""
_VALUE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8}
_VALUE_BYTES |= {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}
_UNITS = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""By the bytes of a value, the letter that reads its bits as an integer."""
_PIECE_VALUES = 2**18


@dataclass(frozen=True)
class TensorStatistics:
    """What the values of a tensor are like; those that are not finite are counted and otherwise left out.

    Attributes:
        nan: How many values are not a number.
        infinite: How many are infinite.
        norm: The square root of the sum of squares.
        least: The least value; None without a finite one, like `largest` and `mean`.
    """

    nan: int
    infinite: int
    norm: float = 0.0
    least: float | None = None
    largest: float | None = None
    mean: float | None = None


@dataclass(frozen=True)
class TensorDifference:
    """How the values of two tensors of one shape differ.

    Attributes:
        values: How many values differ; of tensors of one type, by their bits.
        first: The indices of the first one.
        left: That value in the first tensor.
        right: In the second.
        largest: The largest absolute difference; infinite where only one of two values is finite.
        relative: The largest difference relative to the larger of two absolute values.
    """

    values: int
    first: tuple[int, ...]
    left: float
    right: float
    largest: float
    relative: float


def is_readable(dtype: str) -> bool:
    """Whether values of a type can be read; 8-bit and smaller floats and complex numbers cannot."""
    return dtype in _LETTERS


def measure(tensor: FiledTensor) -> TensorStatistics:
    """Return what the values of a tensor are like. Cost: about 0.1 µs a value.

    Raises:
        OSError: A file cannot be read, or ends too early.
        KeyError: Values of this type cannot be read.
    """
    norm = total = 0.0
    finite_values = nan = infinite = 0
    least, largest = math.inf, -math.inf
    for piece in _pieces(tensor):
        values = _values(piece, tensor.dtype)
        if not math.isfinite(sum(values)):  # some may be finite all the same: a sum can overflow
            nan += sum(map(math.isnan, values))
            infinite += sum(map(math.isinf, values))
            values = [value for value in values if math.isfinite(value)]
        if values:
            finite_values += len(values)
            norm, total = math.hypot(norm, *values), total + sum(values)
            least, largest = min(least, *values), max(largest, *values)
    if not finite_values:
        return TensorStatistics(nan, infinite)
    return TensorStatistics(nan, infinite, norm=norm, least=least, largest=largest, mean=total / finite_values)


def find_difference(one: FiledTensor, other: FiledTensor) -> TensorDifference | None:
    """Return how two tensors of one shape differ; None if all values are the same, and of one type also their bits.

    Cost: equal pieces take the time to read them, others up to 0.5 µs a value.

    Raises:
        OSError: A file cannot be read, or ends too early.
        KeyError: Values of a type cannot be read.
    """
    values, first, pair = 0, 0, (0.0, 0.0)
    largest = relative = 0.0
    same_type = one.dtype == other.dtype
    pieces = zip(_pieces(one), _pieces(other), strict=True)
    for begin, (left_bytes, right_bytes) in zip(count(step=_PIECE_VALUES), pieces, strict=False):
        if same_type and left_bytes == right_bytes:
            continue
        left, right = _values(left_bytes, one.dtype), _values(right_bytes, other.dtype)
        bits = (_bits(left_bytes, one.dtype), _bits(right_bytes, other.dtype)) if same_type else (left, right)
        for place, (a, b) in enumerate(zip(*bits, strict=True)):
            if a == b or not (same_type or a == a or b == b):  # noqa: PLR0124 - two NaN of different types are alike
                continue
            x, y = left[place], right[place]
            if not values:
                first, pair = begin + place, (x, y)
            values += 1
            apart = _apart(x, y)
            largest, relative = max(largest, apart), max(relative, _relative(apart, x, y))
    return TensorDifference(values, _indices(first, one.shape), *pair, largest, relative) if values else None


def have_same_bytes(one: FiledTensor, other: FiledTensor) -> bool:
    """Whether two tensors of one type and shape have the same bytes, whatever their type.

    Raises:
        OSError: A file cannot be read, or ends too early.
    """
    return all(left == right for left, right in zip(_pieces(one), _pieces(other), strict=True))


def _apart(left: float, right: float) -> float:
    """Return the absolute difference of two values; 0 of two NaN, infinite where only one value is finite."""
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    difference = abs(left - right)
    return math.inf if math.isnan(difference) else difference


def _relative(apart: float, left: float, right: float) -> float:
    scale = max(abs(left), abs(right))
    return apart / scale if apart and math.isfinite(apart) else apart


def _indices(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of the value at a place, counted in values; the last index runs fastest."""
    indices = []
    for length in reversed(shape):
        place, index = divmod(place, length)
        indices.append(index)
    return tuple(reversed(indices))


def _pieces(tensor: FiledTensor) -> Iterator[bytes]:
    """Yield the bytes of a tensor, the same number of values at a time wherever its file is cut; the last time fewer."""
    size = _PIECE_VALUES * _VALUE_BYTES.get(tensor.dtype, 1)
    kept = bytearray()
    for piece in read_bytes(tensor):
        kept += piece
        while len(kept) >= size:
            yield bytes(kept[:size])
            del kept[:size]
    if kept:
        yield bytes(kept)


def _values(data: bytes, dtype: str) -> Sequence[float]:
    if dtype == "BF16":  # the upper half of an F32
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[::2], data[1::2]
        data = bytes(wide)
    letter = _LETTERS[dtype]
    return struct.unpack(f"<{len(data) // struct.calcsize(letter)}{letter}", data)


def _bits(data: bytes, dtype: str) -> Sequence[int]:
    size = _VALUE_BYTES[dtype]
    return struct.unpack(f"<{len(data) // size}{_UNITS[size]}", data)
