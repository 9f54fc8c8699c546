"""How good and how fast `ttlaunch place` is: `python benchmarks/place.py [--quick]`.

1. Up to 8 meshes: the cost over random mesh graphs, flows and hosts must equal that of trying every order.
2. 64 meshes: the cost against the best of 20 long simulated annealings (400,000 tries each, seeds 1 to 20), for chains,
   a torus and random graphs, and for the flows of the shipped recipes. Ratio at most 1.05, under 2 seconds.
"""

# ruff: noqa: ANN001, ANN201, S311 - a script of lists and numbers; chance here guards nothing

import itertools
import math
import random
import sys
import time

from ttlaunch.planning.arrangement import Assignment
from ttlaunch.planning.search import solve

RUNS, TRIES = 20, 400_000


def hops(size, links):
    """All-pairs distances; meshes without a path are `size` apart."""
    near = [set() for _ in range(size)]
    for a, b in links:
        near[a].add(b)
        near[b].add(a)
    table = []
    for start in range(size):
        row, edge = [size] * size, [start]
        row[start] = 0
        while edge:
            edge = [b for a in edge for b in near[a] if row[b] == size and (row.__setitem__(b, row[a] + 1) or True)]
        table.append(row)
    return table


def chain(size):
    return [(i, i + 1) for i in range(size - 1)]


def torus(rows, columns):
    right = [(r * columns + c, r * columns + (c + 1) % columns) for r in range(rows) for c in range(columns)]
    return right + [(r * columns + c, (r + 1) % rows * columns + c) for r in range(rows) for c in range(columns)]


def random_graph(size, links, seed):
    """A random tree and further links."""
    draw = random.Random(seed)
    found = {(draw.randrange(i), i) for i in range(1, size)}
    while len(found) < links:
        found.add(tuple(sorted(draw.sample(range(size), 2))))
    return sorted(found)


def flows(kind, size):
    if kind == "pipeline":
        return dict.fromkeys(chain(size), 1.0)
    if kind == "hierarchy":
        return {(worker, size - 2): 1.0 for worker in range(size - 2)} | {(size - 2, size - 1): 1.0}
    if kind == "two pipelines + server":
        half = (size - 1) // 2
        pairs = [(i, i + 1) for i in range(size - 2) if i + 1 != half]
        return dict.fromkeys(pairs, 4.0) | {(worker, size - 1): 1.0 for worker in range(size - 1)}
    return {(a, b): 1.0 for a in range(size) for b in range(a + 1, size)}


def shuffled(table, seed):
    order = random.Random(seed).sample(range(len(table)), len(table))
    return [[table[a][b] for b in order] for a in order]


def annealed(question, seed):
    """A plain, long annealing by exchanges of two: what a patient user would write."""
    draw = random.Random(seed)
    places = draw.sample(range(question.size), question.size)
    cost = least = question.cost(places)
    for number in range(TRIES):
        temperature = 4.0 * (0.05 / 4.0) ** (number / TRIES)
        a, b = draw.randrange(question.size), draw.randrange(question.size)
        if a == b:
            continue
        change = 0.0
        row_a, row_b = question.distances[places[a]], question.distances[places[b]]
        for partner, weight in question.partners[a]:
            if partner != b:
                change += weight * (row_b[places[partner]] - row_a[places[partner]])
        for partner, weight in question.partners[b]:
            if partner != a:
                change += weight * (row_a[places[partner]] - row_b[places[partner]])
        if change <= 0 or draw.random() < math.exp(-change / temperature):
            places[a], places[b] = places[b], places[a]
            cost += change
            least = min(least, cost)
    return least


def all_arrangements(question):
    """Every arrangement, the slow and obvious way."""
    tail = question.blocks[-1:] if question.last_stays else ()
    for moved in itertools.permutations(question.blocks[: len(question.blocks) - len(tail)]):
        orders = [[]]
        for block in (*moved, *tail):
            orders = [[*before, *order] for before in orders for order in itertools.permutations(block)]
        yield from orders


def check_exact(cases):
    """Compare with every order on random questions of 2 to 8 places."""
    draw, slowest = random.Random(1), 0.0
    for _ in range(cases):
        size = draw.choice([2, 3, 4, 5, 5, 6, 6, 7] + [8] * (draw.random() < 0.1))
        table = hops(size, random_graph(size, draw.randint(size - 1, size * (size - 1) // 2), draw.random()))
        pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
        traffic = {pair: float(draw.randint(1, 3)) for pair in draw.sample(pairs, draw.randint(1, len(pairs)))}
        blocks, place = [], 0
        while place < size:
            count = min(size - place, draw.choice([1, 1, 1, 2, 3]))
            blocks.append(tuple(range(place, place + count)))
            place += count
        question = Assignment(table, traffic, tuple(blocks), last_stays=draw.random() < 0.2)
        begin = time.perf_counter()
        found = solve(question)
        slowest = max(slowest, time.perf_counter() - begin)
        assert question.cost(found) == min(map(question.cost, all_arrangements(question)))
    print(f"up to 8 meshes: {cases} random cases equal the best of all orders; the slowest took {slowest:.2f} s")


def compare(shape, table, kind, runs):
    size = len(table)
    question = Assignment(shuffled(table, 7), flows(kind, size), tuple((place,) for place in range(size)))
    begin = time.perf_counter()
    cost = question.cost(solve(question))
    seconds = time.perf_counter() - begin
    best = min(annealed(question, seed) for seed in range(1, runs + 1))
    ratio = cost / best
    print(
        f"{shape:16} {kind:24} {question.cost(question.today):7g} {cost:7g} {best:7g} {ratio:7.3f} {seconds:7.2f} s",
        flush=True,
    )
    return ratio, seconds


def main():
    quick = "--quick" in sys.argv
    check_exact(40 if quick else 400)
    shapes = {
        "chain": hops(64, chain(64)),
        "torus 8 × 8": hops(64, torus(8, 8)),
        "torus 4 × 16": hops(64, torus(4, 16)),
    }
    shapes |= {f"random, {links} links": hops(64, random_graph(64, links, links)) for links in (80, 128, 256)}
    kinds = ("pipeline", "hierarchy", "two pipelines + server", "all pairs")
    print(f"\n{'64 meshes':16} {'flows':24} {'today':>7} {'place':>7} {'anneal':>7} {'ratio':>7} {'time':>9}")
    results = [compare(shape, table, kind, 2 if quick else RUNS) for shape, table in shapes.items() for kind in kinds]
    worst, slowest = (max(column) for column in zip(*results, strict=True))
    print(f"worst ratio {worst:.3f}, slowest {slowest:.2f} s")
    return 0 if worst <= 1.05 and slowest < 2 else 1


if __name__ == "__main__":
    sys.exit(main())
