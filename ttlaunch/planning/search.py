"""Find a good arrangement of many places with bounded work: greedy starts, simulated annealing, then descent.

The search is deterministic: its random numbers come from a generator with a constant seed, and its budget is a number of
lookups of distances, not of seconds. Equal inputs therefore give equal results on every machine, without a clock.

Source: D. Connolly, "An improved annealing scheme for the QAP", European Journal of Operational Research 46(1), 1990, for
annealing by exchanges of two. The reversals are those of 2-opt (G. Croes, "A Method for Solving Traveling-Salesman
Problems", Operations Research 6(6), 1958): they improve chains of ranks, which exchanges of two cannot.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import exp

from ttlaunch.planning.arrangement import EXACT_UP_TO, Assignment, best_of_all

LOOKUPS = 1_500_000
"""How many distances a search may look up; takes pure Python about a second."""

_ROUNDS = 4
_LONGEST_REVERSAL = 12
_HOTTEST, _COLDEST = 0.6, 0.05
_EPSILON = 1e-9

Moves = list[tuple[int, int]]
"""Ranks with the places that they get; together a permutation of the places that they had."""

BlockOrder = list[int] | None
"""The order of blocks after a move; None if the move does not change it."""


def solve(problem: Assignment, *, lookups: int = LOOKUPS) -> list[int]:
    """Find a place for each rank: the best arrangement for up to 8 places, a good one for more; never worse than the current one."""
    if problem.size <= EXACT_UP_TO:
        return best_of_all(problem)
    state = _State(problem, problem.current, _generator(1))
    if not problem.traffic or state.fixed:
        return problem.current
    starts = [problem.current, *_greedy_starts(problem, lookups // 4)]
    starts = sorted(starts, key=problem.cost)[:_ROUNDS]
    best = problem.current  # stays the best at equal cost: a change of cables must gain something
    least = _least(problem)
    for number in range(_ROUNDS):
        if problem.cost(best) <= least:
            break
        state = _State(problem, list(starts[number % len(starts)]), _generator(number + 1))
        # Annealing from a local optimum wastes none of its budget on moves that descent makes anyway.
        _descend(state, lookups // (8 * _ROUNDS))
        found = _anneal(state, lookups * 3 // (4 * _ROUNDS))
        state = _State(problem, found, _generator(number + 1))
        _descend(state, lookups // (8 * _ROUNDS))
        best = min(best, state.places, key=problem.cost)
    return best


class _State:
    """An arrangement that changes by moves.

    Attributes:
        work: The number of distances looked up so far.
        single: Whether every block has one place.
        movable: The number of ranks whose places may change; they are the first ones.
        sizes: The number of places of each block.
        order: The current order of the blocks.
    """

    def __init__(self, problem: Assignment, places: list[int], draw: Callable[[int], int]) -> None:
        self.problem, self.places, self.draw = problem, places, draw
        self.work = 0
        self.single = all(len(block) == 1 for block in problem.blocks)
        self.movable = problem.size - 1 if problem.last_stays else problem.size
        block_of = {place: number for number, block in enumerate(problem.blocks) for place in block}
        self.sizes = [len(block) for block in problem.blocks]
        self.order = list(dict.fromkeys(block_of[place] for place in places))

    @property
    def fixed(self) -> bool:
        """Return whether nothing can be moved."""
        return self.problem.size < 2 or (len(self.sizes) == 1 and self.sizes[0] == 1)  # noqa: PLR2004 - a pair

    def change(self, moves: Moves) -> float:
        """Return by how much the moves would change the cost."""
        if len(moves) == 2:  # noqa: PLR2004 - an exchange, the commonest move by far
            return self._exchange(moves[0][0], moves[1][0])
        new, places, total = dict(moves), self.places, 0.0
        distances, partners = self.problem.distances, self.problem.partners
        for rank, place in moves:
            before, after = distances[places[rank]], distances[place]
            self.work += len(partners[rank])
            for partner, weight in partners[rank]:
                if partner not in new:
                    total += weight * (after[places[partner]] - before[places[partner]])
                elif partner > rank:
                    total += weight * (after[new[partner]] - before[places[partner]])
        return total

    def _exchange(self, a: int, b: int) -> float:
        places, partners = self.places, self.problem.partners
        at_a, at_b = self.problem.distances[places[a]], self.problem.distances[places[b]]
        self.work += len(partners[a]) + len(partners[b])
        total = 0.0
        for partner, weight in partners[a]:
            if partner != b:
                total += weight * (at_b[places[partner]] - at_a[places[partner]])
        for partner, weight in partners[b]:
            if partner != a:
                total += weight * (at_a[places[partner]] - at_b[places[partner]])
        return total

    def apply(self, moves: Moves) -> None:
        for rank, place in moves:
            self.places[rank] = place

    def random_moves(self) -> tuple[Moves, BlockOrder]:
        """Draw a move that keeps the places of each block together."""
        if self.single:
            return self._random_single(), None
        self.work += len(self.order) // 2
        return self._random_in_blocks()

    def _random_single(self) -> Moves:
        a, b = self.draw(self.movable), self.draw(self.movable)
        if self.draw(4) == 0:
            b = min(self.movable - 1, a + 1 + self.draw(_LONGEST_REVERSAL))
            return reversal(self.places, a, b)
        return [(a, self.places[b]), (b, self.places[a])] if a != b else []

    def _random_in_blocks(self) -> tuple[Moves, BlockOrder]:
        blocks = len(self.order) - (1 if self.problem.last_stays else 0)
        kind, first = self.draw(3), self.draw(len(self.order))
        size = self.sizes[self.order[first]]
        if size > 1 and (blocks < 2 or kind == 0):  # noqa: PLR2004 - a pair
            begin = sum(self.sizes[block] for block in self.order[:first])
            a, b = begin + self.draw(size), begin + self.draw(size)
            return ([(a, self.places[b]), (b, self.places[a])] if a != b else []), None
        second = self.draw(max(1, blocks))
        first, second = min(first, second), max(first, second)
        if second >= blocks or (first == second and kind != 2):  # noqa: PLR2004 - a reversal
            return [], None
        if kind == 2:  # noqa: PLR2004 - as above
            return self.block_reversal(first, min(second, first + _LONGEST_REVERSAL))
        return self.block_exchange(first, second)

    def block_exchange(self, first: int, second: int) -> tuple[Moves, BlockOrder]:
        """Return the move that exchanges two blocks; blocks between them shift if the two differ in size."""
        starts = self._starts()
        begin, end = starts[first], starts[second + 1]
        one = self.places[begin : starts[first + 1]]
        between = self.places[starts[first + 1] : starts[second]]
        other = self.places[starts[second] : end]
        order = list(self.order)
        order[first], order[second] = order[second], order[first]
        return self._moves(begin, [*other, *between, *one]), order

    def block_reversal(self, first: int, last: int) -> tuple[Moves, BlockOrder]:
        """Return the move that reverses consecutive blocks, and the places within each of them."""
        starts = self._starts()
        begin, end = starts[first], starts[last + 1]
        order = [*self.order[:first], *self.order[first : last + 1][::-1], *self.order[last + 1 :]]
        return self._moves(begin, self.places[begin:end][::-1]), order

    def _starts(self) -> list[int]:
        """Return the first rank of each block, and the number of ranks."""
        return [0, *accumulate(self.sizes[block] for block in self.order)]

    def _moves(self, begin: int, new: Sequence[int]) -> Moves:
        return [(rank, place) for rank, place in enumerate(new, begin) if self.places[rank] != place]


def reversal(places: Sequence[int], first: int, last: int) -> Moves:
    """Return the move that reverses a sequence of consecutive ranks."""
    return [(rank, places[first + last - rank]) for rank in range(first, last + 1) if 2 * rank != first + last]


def _least(problem: Assignment) -> float:
    """Return a lower bound of the cost: each pair that communicates costs at least its weight times the smallest distance."""
    size = problem.size
    closest = min(problem.distances[a][b] for a in range(size) for b in range(a))
    return closest * sum(problem.traffic.values())


def _anneal(state: _State, budget: int) -> list[int]:
    """Return the best arrangement found by annealing, which accepts worse ones with a probability that decreases."""
    scale = sum(state.problem.traffic.values()) / len(state.problem.traffic)
    best, cost, least = list(state.places), 0.0, 0.0
    state.work = tries = 0
    while state.work + tries < budget:
        tries += 1
        temperature = scale * _HOTTEST * (_COLDEST / _HOTTEST) ** ((state.work + tries) / budget)
        moves, order = state.random_moves()
        change = state.change(moves) if moves else 0.0
        if not moves or (change > 0 and state.draw(1 << 30) >= exp(-change / temperature) * (1 << 30)):
            continue
        state.apply(moves)
        state.order = order or state.order
        cost += change
        if cost < least - _EPSILON:
            least, best = cost, list(state.places)
    return best


def _descend(state: _State, budget: int) -> None:
    """Apply moves that lower the cost, until no move does or the budget is used up."""
    state.work, improved = 0, True
    while improved and state.work < budget:
        improved = False
        for moves, order in _all_moves(state):
            if state.work >= budget:
                return
            if state.change(moves) < -_EPSILON:
                state.apply(moves)
                state.order = order or state.order
                improved = True


def _all_moves(state: _State) -> Iterator[tuple[Moves, BlockOrder]]:
    if state.single:
        for a in range(state.movable):
            for b in range(a + 1, state.movable):
                yield [(a, state.places[b]), (b, state.places[a])], None
                if b > a + 2:
                    yield reversal(state.places, a, b), None
        return
    blocks = len(state.order) - (1 if state.problem.last_stays else 0)
    for first in range(blocks):
        for second in range(first + 1, blocks):
            yield state.block_exchange(first, second)
            yield state.block_reversal(first, second)
    begin = 0
    for block in list(state.order):
        end = begin + state.sizes[block]
        yield from (
            ([(a, state.places[b]), (b, state.places[a])], None) for a in range(begin, end) for b in range(a + 1, end)
        )
        begin = end


def _greedy_starts(problem: Assignment, budget: int) -> list[list[int]]:
    """Build one arrangement from each place, until the budget is used up; only if every block has one place."""
    if problem.last_stays or any(len(block) > 1 for block in problem.blocks):
        return []
    order = _order_of_growth(problem)
    work = problem.size * (len(problem.traffic) + problem.size)
    return [_grow(problem, start, order) for start in range(min(problem.size, budget // work))]


def _order_of_growth(problem: Assignment) -> list[int]:
    """Order the ranks so that each has the most traffic with those before it.

    The first rank is one with unusually much traffic; if there is none, one with unusually little, such as the end of a chain.
    """
    volume = [sum(weight for _, weight in partners) for partners in problem.partners]
    typical = sorted(volume)[problem.size // 2]
    first = max(range(problem.size), key=lambda r: (volume[r] > 2 * typical, volume[r] < typical, -r))
    order, pull = [first], [0.0] * problem.size
    left = set(range(problem.size)) - {first}
    while left:
        for partner, weight in problem.partners[order[-1]]:
            pull[partner] += weight
        order.append(max(left, key=lambda rank: (pull[rank], volume[rank], -rank)))
        left.remove(order[-1])
    return order


def _grow(problem: Assignment, start: int, order: Sequence[int]) -> list[int]:
    """Put each rank where it adds the least cost, preferring places with few free neighbours (H. Warnsdorff's rule)."""
    distances, size = problem.distances, problem.size
    least = min((value for row in distances for value in row if value > 0), default=1.0)
    near = [[other for other in range(size) if 0 < distances[place][other] <= least] for place in range(size)]
    free, places = set(range(size)), [-1] * size
    for number, rank in enumerate(order):
        placed = [(places[partner], weight) for partner, weight in problem.partners[rank] if places[partner] >= 0]
        scores = (
            (
                sum(weight * distances[place][other] for other, weight in placed),
                len(free.intersection(near[place])),
                place,
            )
            for place in free
        )
        place = min(scores)[2] if number else start
        places[rank] = place
        free.remove(place)
    return places


def _generator(seed: int) -> Callable[[int], int]:
    """Return a function `draw(n)` that returns numbers from 0 to n-1, the same ones for the same seed on every machine.

    Source: G. Marsaglia, "Xorshift RNGs", Journal of Statistical Software 8(14), 2003: triple (13, 7, 17).
    """
    state = 0x9E3779B97F4A7C15 * seed & 0xFFFFFFFFFFFFFFFF

    def draw(below: int) -> int:
        nonlocal state
        state ^= state << 13 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 7
        state ^= state << 17 & 0xFFFFFFFFFFFFFFFF
        return (state >> 11) % below

    return draw
