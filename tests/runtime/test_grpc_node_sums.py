"""The store of sums: whatever comes in whatever order, each total is the sum of each leaf once, and nothing stays."""

import random

import pytest
import torch

from ttlaunch.runtime.comm.grpc.directory import Peer
from ttlaunch.runtime.comm.grpc.node_sums import NodeSums, StoreFullError
from ttlaunch.runtime.comm.grpc.vectors import Key

N = 12


def leaf(index, step):
    return torch.arange(N, dtype=torch.float32) + 100 * index + 10_000 * step


def a_node(rng, step, leaves):
    """A node of the tree of `leaves` leaves, a range of its values, and these."""
    size = rng.choice([size for size in (1, 2, 4) if size <= leaves])
    start = size * rng.randrange(leaves // size)
    first = rng.randrange(N)
    last = rng.randrange(first + 1, N + 1)
    value = sum(leaf(index, step) for index in range(start, start + size))
    return Key("g", step, first, last, start, size), value[first:last].clone()


@pytest.mark.parametrize("seed", range(50))
def test_a_total_is_there_exactly_if_its_leaves_are_and_has_each_once(seed):
    rng = random.Random(seed)  # noqa: S311 - no secret
    sums, leaves, known = NodeSums(), rng.choice((1, 3, 5, 8)), set()
    wanted = Key("g", 3, 2, 9, size=leaves)
    expected = sum(leaf(index, 3) for index in range(leaves))[2:9]
    for _ in range(300):
        key, value = a_node(rng, 3, leaves)
        assert sums.put(key, value) == (key not in known)
        known.add(key)
        parts = sums.total(wanted)
        if parts is not None:
            assert torch.equal(expected, torch.cat(parts))
    assert sums.total(wanted) is not None


def test_a_step_is_dropped_when_all_members_have_taken_it_or_when_the_one_after_the_next_comes():
    sums = NodeSums()
    for step in range(3):
        assert sums.put(Key("g", step, 0, N, 0, 1), leaf(0, step))
    assert 2 * 4 * N == sums.held_bytes
    for worker in (0, 0, 1):
        assert sums.held_bytes
        sums.take(Key("g", 2, 0, N, size=1), Peer(worker), members=2)
    assert 0 == sums.held_bytes
    assert not sums.put(Key("g", 1, 0, N, 0, 1), leaf(0, 1))
    sums.clear()
    assert sums.put(Key("g", 1, 0, N, 0, 1), leaf(0, 1))


def test_no_more_than_the_limit_is_kept():
    sums = NodeSums(most_bytes=4 * N)
    assert sums.put(Key("g", 0, 0, N, 0, 1), leaf(0, 0))
    with pytest.raises(StoreFullError):
        sums.put(Key("g", 0, 0, N, 1, 1), leaf(1, 0))
