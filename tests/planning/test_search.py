"""The arrangement of few places is the best of all; that of many keeps blocks whole and is never worse than today's."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch.planning.arrangement import Assignment
from ttlaunch.planning.search import solve


@st.composite
def questions(draw, *, least, most):
    """Symmetric distances, some traffic, and blocks of 1 to 3 places."""
    size = draw(st.integers(least, most))
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    distances = [[0.0] * size for _ in range(size)]
    for a, b in pairs:
        distances[a][b] = distances[b][a] = float(draw(st.integers(0, 5)))
    talking = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    traffic = {pair: float(draw(st.integers(1, 3))) for pair in talking}
    blocks, place = [], 0
    while place < size:
        count = draw(st.integers(1, min(3, size - place)))
        blocks.append(tuple(range(place, place + count)))
        place += count
    return Assignment(distances, traffic, tuple(blocks), last_stays=draw(st.booleans()))


def blocks_of(question, places):
    """The blocks in the order in which an arrangement visits them; None if it breaks one apart."""
    left, order = list(places), []
    while left:
        block = next(block for block in question.blocks if left[0] in block)
        if set(left[: len(block)]) != set(block):
            return None
        order.append(block)
        left = left[len(block) :]
    return order


def all_arrangements(question):
    """Every arrangement, the slow and obvious way."""
    tail = question.blocks[-1:] if question.last_stays else ()
    for moved in permutations(question.blocks[: len(question.blocks) - len(tail)]):
        orders = [[]]
        for block in (*moved, *tail):
            orders = [[*before, *order] for before in orders for order in permutations(block)]
        yield from orders


@given(questions(least=1, most=6))
@settings(deadline=None)
def test_few_places_get_the_best_of_all_orders(question):
    assert min(map(question.cost, all_arrangements(question))) == question.cost(solve(question))


@given(questions(least=9, most=12))
@settings(deadline=None, max_examples=examples(30))
def test_many_places_keep_blocks_whole_and_are_not_worse_than_today(question):
    places = solve(question, lookups=20_000)
    order = blocks_of(question, places)
    assert sorted(places) == list(range(question.size))
    assert order is not None
    assert not question.last_stays or order[-1] == question.blocks[-1]
    assert question.cost(places) <= question.cost(question.current)


def chain_of(size, order):
    """A pipeline of ranks on a chain of places that are visited in `order`."""
    distances = [[float(abs(a - b)) for b in order] for a in order]
    return Assignment(distances, {(i, i + 1): 1.0 for i in range(size - 1)}, tuple((i,) for i in range(size)))


@pytest.mark.parametrize("size", [9, 16, 64])
def test_a_scattered_pipeline_is_laid_along_its_chain(size):
    order = [i * 7 % size for i in range(size)] if size % 7 else list(range(size))
    question = chain_of(size, order)
    assert size - 1 == question.cost(solve(question))


@pytest.mark.parametrize("slots", [2, 4, 8])
def test_a_scattered_pipeline_on_hosts_of_several_meshes_is_laid_along_its_chain(slots):
    hosts = 32 // slots
    order = [host * 3 % hosts * slots + (mesh + host) % slots for host in range(hosts) for mesh in range(slots)]
    blocks = tuple(tuple(range(begin, begin + slots)) for begin in range(0, 32, slots))
    question = replace(chain_of(32, order), blocks=blocks)
    assert 31 == question.cost(solve(question))


def test_equal_questions_have_equal_answers():
    question = chain_of(30, [i * 7 % 30 for i in range(30)])
    assert solve(question) == solve(question)


def test_the_better_of_two_equal_orders_is_the_present_one():
    question = Assignment([[0.0, 1.0], [1.0, 0.0]], {(0, 1): 1.0}, ((0,), (1,)))
    assert [0, 1] == solve(question)
