"""Name the parts of a tensor in checkpoints, where no rank has all of it, so that any layout finds what it needs.

`blocks.0.attention_out.weight@0:64/64,16:32/64` has all rows and columns 16 to 31 of a matrix of 64 rows and 64 columns. A
name without `@` is that of a whole tensor. Parts of one tensor are equal or have no value in common.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_MARK = "@"
_BOUND = re.compile(r"([0-9]{1,15}):([0-9]{1,15})/([0-9]{1,15})")


@dataclass(frozen=True)
class Part:
    """A rectangular part of a tensor.

    Attributes:
        name: The name of the whole tensor.
        places: The range that the part covers in each dimension.
        shape: The shape of the whole tensor.

    >>> str(Part("head.weight", (range(0, 4), range(2, 8)), (4, 8)))
    'head.weight@0:4/4,2:8/8'
    """

    name: str
    places: tuple[range, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        bounds = (
            f"{values.start}:{values.stop}/{whole}" for values, whole in zip(self.places, self.shape, strict=True)
        )
        return f"{self.name}{_MARK}{','.join(bounds)}"

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(len(values) for values in self.places)

    def overlap(self, other: "Part") -> tuple[range, ...]:
        """Return the range that both parts cover in each dimension; if they have no value in common, one is empty."""
        pairs = zip(self.places, other.places, strict=True)
        return tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)

    def within(self, places: Sequence[range]) -> tuple[slice, ...]:
        """Return slices that select `places`, given in the whole tensor, from a tensor that holds only this part."""
        pairs = zip(self.places, places, strict=True)
        return tuple(slice(values.start - own.start, values.stop - own.start) for own, values in pairs)


def whole_tensor(name: str, shape: Sequence[int]) -> Part:
    """Return the part that covers a whole tensor."""
    return Part(name, tuple(range(length) for length in shape), tuple(shape))


def parse_part(text: str) -> Part | None:
    """Parse a stored name into a part; None for the name of a whole tensor.

    >>> parse_part("head.weight@0:4/4,2:8/8").places
    (range(0, 4), range(2, 8))
    """
    name, _, bounds = text.partition(_MARK)
    matches = [_BOUND.fullmatch(bound) for bound in bounds.split(",")]
    numbers = [[int(number) for number in match.groups()] for match in matches if match]
    if len(numbers) < len(matches) or not all(start <= stop <= length for start, stop, length in numbers):
        return None
    return Part(name, tuple(range(start, stop) for start, stop, _ in numbers), tuple(length for *_, length in numbers))


def is_complete(parts: Collection[Part]) -> bool:
    """Whether parts of one tensor form a grid that covers every value exactly once; the parts are all different."""
    first, parts = next(iter(parts)), [part for part in parts if part.size]
    for dimension, length in enumerate(first.shape):
        ranges = sorted({(part.places[dimension].start, part.places[dimension].stop) for part in parts})
        if [0, *(stop for _, stop in ranges)] != [*(start for start, _ in ranges), length]:
            return False
    return sum(part.size for part in parts) == math.prod(first.shape)


def name_of_whole(text: str) -> str:
    """Return the tensor's name, given the stored name of the tensor or of a part of it."""
    return text.partition(_MARK)[0]
