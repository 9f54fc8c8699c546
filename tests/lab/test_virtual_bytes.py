"""The bytes of each pair of ranks on a virtual clock are compared with the formula."""

from itertools import permutations

import pytest

from ttlaunch.lab.virtual_bytes import bytes_of_pairs, count_differing
from ttlaunch.records.virtual import VirtualEdge
from ttlaunch.spec.recipe.traffic import Traffic

GROUPS = ((0,), (1, 2, 3))
SENT = {(0, 1): (3, 8), (1, 0): (1, 16), (1, 1): (2, 4)}
"""From each rank of a group to how many of another group, and how much to each."""
RIGHT = {pair: 8 if pair[0] == 0 else 16 if pair[1] == 0 else 4 for pair in permutations(range(4), 2)}


def differing(sizes):
    edges = [
        VirtualEdge(source=source, dest=dest, peers=peers, messages=1, bytes=size, step_bytes=size)
        for (source, dest), (peers, size) in SENT.items()
    ]
    flows = [Traffic("gradients", *pair, per_step=size) for pair, size in sizes.items()]
    return count_differing(bytes_of_pairs(flows, world_size=4, steps=1), GROUPS, edges)


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({}, 0),
        ({(2, 3): 5}, 1),
        ({(2, 3): 5, (3, 2): 5, (0, 1): 0}, 3),
        ({(1, 2): 8, (1, 0): 8}, 2),
        (dict.fromkeys(RIGHT, 0), 12),
    ],
)
def test_each_pair_with_other_bytes_than_the_formula_counts(changed, count):
    assert count == differing(RIGHT | changed)


def test_what_only_some_steps_send_counts_in_these_and_in_the_last():
    flows = [
        Traffic("counts", 0, 1, per_step=3, in_first_step=2),
        Traffic("weights", 0, 1, per_step=100, every=2),
        Traffic("losses", 1, 0, per_validation=7, once=7),
    ]
    assert [{1: 3 * 5 + 2 + 3 * 100}, {0: 0}] == bytes_of_pairs(flows, world_size=2, steps=5)
