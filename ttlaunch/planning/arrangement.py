"""Find the best order of places for ranks that communicate: a quadratic assignment problem, as plain numbers.

Ranks 0, 1, … take the places of *blocks*, one block after the other. A block is a host with its meshes, which move together.
The places within a block may be reordered, and so may the blocks. The cost of an arrangement is
Σ traffic(a, b) × distance(place of a, place of b) over all pairs of ranks.

Source: T. Koopmans, M. Beckmann, "Assignment Problems and the Location of Economic Activities", Econometrica 25(1), 1957.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

EXACT_UP_TO = 8
"""The largest number of places for which every order is tried; `search.py` handles more places."""


@dataclass(frozen=True)
class Assignment:
    """The problem to solve: distances, traffic, and which places may change their order.

    Attributes:
        distances: The distances between places, a symmetric matrix.
        traffic: The traffic of each pair of ranks, each pair once.
        blocks: The places of each block in their current order; together, the blocks have each place once.
        last_stays: Whether the last block keeps its position, because the ranks do not fill that host.
        partners: For each rank, the ranks that it communicates with, and the traffic with each.
    """

    distances: Sequence[Sequence[float]]
    traffic: Mapping[tuple[int, int], float]
    blocks: tuple[tuple[int, ...], ...]
    last_stays: bool = False
    partners: tuple[tuple[tuple[int, float], ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        partners: list[list[tuple[int, float]]] = [[] for _ in self.distances]
        for (a, b), weight in self.traffic.items():
            partners[a].append((b, weight))
            partners[b].append((a, weight))
        object.__setattr__(self, "partners", tuple(tuple(each) for each in partners))

    @property
    def size(self) -> int:
        return len(self.distances)

    @property
    def current(self) -> list[int]:
        """Return the place of each rank before anything is moved."""
        return [place for block in self.blocks for place in block]

    def cost(self, places: Sequence[int]) -> float:
        """Return the cost of an arrangement with rank `r` in place `places[r]`."""
        return sum(weight * self.distances[places[a]][places[b]] for (a, b), weight in self.traffic.items())


def best_of_all(problem: Assignment) -> list[int]:
    """Find the best arrangement by trying all, except those whose beginning already costs as much as the best one so far.

    Of arrangements with equal cost, the current one is preferred. Cost: up to `size!` arrangements.
    """
    best, least = problem.current, problem.cost(problem.current)
    places: list[int] = []

    def extend(blocks: tuple[tuple[int, ...], ...], cost: float) -> None:
        nonlocal best, least
        if not blocks:
            if cost < least:
                best, least = list(places), cost
            return
        movable = len(blocks) - 1 if problem.last_stays and len(blocks) > 1 else len(blocks)
        for index, block in enumerate(blocks[:movable]):
            rest = blocks[:index] + blocks[index + 1 :]
            for order in permutations(block):
                more = _added(problem, places, order, allowed=least - cost)
                if more is not None:
                    places.extend(order)
                    extend(rest, cost + more)
                    del places[-len(order) :]

    extend(problem.blocks, 0.0)
    return best


def _added(problem: Assignment, places: list[int], order: tuple[int, ...], *, allowed: float) -> float | None:
    """Return the cost that the next ranks add in the places `order`; None if it reaches `allowed`."""
    more, occupied = 0.0, [*places, *order]
    for rank in range(len(places), len(occupied)):
        row = problem.distances[occupied[rank]]
        for partner, weight in problem.partners[rank]:
            if partner < rank:
                more += weight * row[occupied[partner]]
        if more >= allowed:
            return None
    return more
