"""A grid of ranks that share the work in several ways at once, with one axis for each way.

    dp 2 x pp 2 x tp 2:       pp 0                  pp 1
                   dp 0   rank 0 (tp 0)         rank 2 (tp 0)
                          rank 1 (tp 1)         rank 3 (tp 1)
                   dp 1   rank 4 (tp 0)         rank 6 (tp 0)
                          rank 5 (tp 1)         rank 7 (tp 1)

Along `dp`, ranks have the same weights and different micro-batches; along `pp`, different blocks; along `tp`, different
parts of the same matrices. Ranks along the last axis have consecutive numbers, so the ranks that communicate most are on one host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ttlaunch.runtime.world import Rank


@dataclass(frozen=True)
class RankGrid:
    """A grid of ranks, seen from one of them.

    Attributes:
        rank: The rank that sees the grid.
        ranks: All ranks, in the order of the grid.
        axes: The length of each axis by name; ranks along the last axis follow each other in `ranks`.
    """

    rank: Rank
    ranks: tuple[Rank, ...]
    axes: Mapping[str, int]

    def place(self, axis: str) -> int:
        """Return this rank's place along an axis, from 0."""
        return self.ranks.index(self.rank) // self._stride(axis) % self.axes[axis]

    def along(self, axis: str) -> tuple[Rank, ...]:
        """Return the ranks, this one included, whose places on all other axes equal this one's, in order."""
        index, stride = self.ranks.index(self.rank), self._stride(axis)
        first = index - self.place(axis) * stride
        return tuple(self.ranks[first + place * stride] for place in range(self.axes[axis]))

    def _stride(self, axis: str) -> int:
        names = list(self.axes)
        return prod(self.axes[name] for name in names[names.index(axis) + 1 :])


def place_in_grid(rank: Rank, ranks: Sequence[Rank], **axes: int) -> RankGrid:
    """Arrange ranks in a grid and return it as `rank` sees it; name the axis that changes most slowly first.

    >>> grid = place_in_grid(Rank(5), [Rank(rank) for rank in range(8)], dp=2, pp=2, tp=2)
    >>> grid.place("dp"), grid.place("pp"), grid.along("tp"), grid.along("dp")
    (1, 0, (4, 5), (1, 5))

    Raises:
        ValueError: There are more or fewer ranks than places.
    """
    if prod(axes.values()) != len(ranks):
        text = " × ".join(f"{name} {length}" for name, length in axes.items())
        raise ValueError(f"a grid of {text} has {prod(axes.values())} places, but there are {len(ranks)} ranks")
    return RankGrid(rank, tuple(ranks), dict(axes))
