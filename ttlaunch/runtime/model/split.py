"""Which values of a parameter a rank has, where several ranks split it, and the names of these parts in a checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ttlaunch.stored_parts import Part


@dataclass(frozen=True)
class Split:
    """A rank's values of one parameter: some ranges of one dimension, joined in order, and all of the other dimensions.

    Attributes:
        shape: The shape of the whole parameter.
        dim: The dimension that is split.
        ranges: The ranges of this dimension; several if the parameter combines several matrices, such as query, key and
            value.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[range, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the values that the rank has."""
        length = sum(len(places) for places in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def cut(self, whole: Tensor) -> Tensor:
        """The rank's values of a whole parameter, in a new tensor."""
        return torch.cat([whole.narrow(self.dim, places.start, len(places)) for places in self.ranges], self.dim)

    def paste(self, local: Tensor, *, into: Tensor) -> None:
        """Write the rank's values to their places in a whole parameter."""
        for places, part in self._pieces(local):
            into.narrow(self.dim, places.start, len(places)).copy_(part)

    def parts(self, name: str, local: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Cut the rank's values of a parameter, or of an optimizer's mean of it, into views that checkpoints store."""
        for places, part in self._pieces(local):
            bounds = [range(length) for length in self.shape]
            bounds[self.dim] = places
            yield Part(name, tuple(bounds), self.shape), part

    def _pieces(self, local: Tensor) -> Iterator[tuple[range, Tensor]]:
        start = 0
        for places in self.ranges:
            yield places, local.narrow(self.dim, start, len(places))
            start += len(places)


def split_evenly(shape: Sequence[int], *, dim: int, place: int, count: int, matrices: Sequence[int] = ()) -> Split:
    """The part of one of `count` ranks, of equal size for all.

    Args:
        shape: The shape of the whole parameter.
        dim: The dimension to split.
        place: The rank's position among them.
        count: Ranks.
        matrices: The length of each of the matrices that are stacked in this dimension, of which each is split; empty: one.

    >>> split_evenly((12, 4), dim=0, place=1, count=2, matrices=(8, 2, 2)).ranges
    (range(4, 8), range(9, 10), range(11, 12))

    Raises:
        ValueError: The ranks cannot have equal parts.
    """
    ranges, start = [], 0
    for length in matrices or (shape[dim],):
        each, rest = divmod(length, count)
        if rest:
            raise ValueError(f"{count} ranks cannot have equal parts of {length} rows or columns")
        ranges.append(range(start + place * each, start + (place + 1) * each))
        start += length
    return Split(tuple(shape), dim, tuple(ranges))
