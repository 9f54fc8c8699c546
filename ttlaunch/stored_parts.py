"""Name the parts of a tensor in checkpoints, where no rank has all of it, so that any layout finds what it needs.

`blocks.0.attention_out.weight@0:64/64,16:32/64` has all rows and columns 16 to 31 of a matrix of 64 rows and 64 columns. A
name without `@` is that of a whole tensor. Parts of one tensor are equal or have no value in common.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MARK = "@"


@dataclass(frozen=True)
class Part:
    """A rectangular part of a tensor.

    Attributes:
        name: The name of the whole tensor.
        places: The range in each of its dimensions.
        shape: The shape of the whole tensor.

    >>> str(Part("head.weight", (range(0, 4), range(2, 8)), (4, 8)))
    'head.weight@0:4/4,2:8/8'
    """

    name: str
    places: tuple[range, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        bounds = (f"{at.start}:{at.stop}/{whole}" for at, whole in zip(self.places, self.shape, strict=True))
        return f"{self.name}{_MARK}{','.join(bounds)}"

    @property
    def size(self) -> int:
        """Values."""
        return math.prod(len(at) for at in self.places)

    def overlap(self, other: "Part") -> tuple[range, ...]:
        """The places that both parts have, in each dimension; a range is empty if they have nothing in common."""
        pairs = zip(self.places, other.places, strict=True)
        return tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)

    def within(self, places: Sequence[range]) -> tuple[slice, ...]:
        """Slices that index places of this part in a tensor that holds only the part."""
        pairs = zip(self.places, places, strict=True)
        return tuple(slice(at.start - own.start, at.stop - own.start) for own, at in pairs)


def whole(name: str, shape: Sequence[int]) -> Part:
    """The part that is all of a tensor."""
    return Part(name, tuple(range(length) for length in shape), tuple(shape))


def parse_part(text: str) -> Part | None:
    """Parse a stored name into a part; None for the name of a whole tensor.

    >>> parse_part("head.weight@0:4/4,2:8/8").places
    (range(0, 4), range(2, 8))
    """
    name, mark, bounds = text.partition(_MARK)
    if not mark:
        return None
    try:
        numbers = [[int(number) for number in bound.replace("/", ":").split(":")] for bound in bounds.split(",")]
        places = tuple(range(start, stop) for start, stop, _ in numbers)
        return Part(name, places, tuple(length for _, _, length in numbers))
    except ValueError:
        return None


def name_of_whole(text: str) -> str:
    """The name of the tensor that a stored name is of, or is of a part of."""
    return text.partition(_MARK)[0]
