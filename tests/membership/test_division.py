"""Every leaf is computed exactly once, whatever the members have and however fast they are."""

import random

import pytest

from ttlaunch.membership.division import blocks_of, choose_kept, divide_missing, share, step_seconds
from ttlaunch.spec.recipe.blocks import aligned_subtrees


def nodes_of(rng, micro_batches):
    """Some nodes that a member could have: those of a row of leaves, without a few."""
    first = rng.randrange(micro_batches)
    stop = rng.randint(first, micro_batches)
    return [(n.start, n.stop) for n in aligned_subtrees(range(first, stop)) if rng.random() < 0.8]


@pytest.mark.parametrize("seed", range(50))
def test_kept_nodes_and_missing_leaves_cover_each_leaf_exactly_once(seed):
    rng = random.Random(seed)  # noqa: S311 - cases to try, no secret
    micro_batches, members = rng.randint(1, 33), rng.randint(1, 5)
    held = [nodes_of(rng, micro_batches) for _ in range(members)]
    kept = choose_kept(held, micro_batches=micro_batches)
    paces = [rng.choice([None, 0.1, 0.4]) for _ in range(members)]
    todo = divide_missing(kept, micro_batches=micro_batches, paces=paces)
    leaves = sorted(leaf for rows in [*kept, *todo] for first, stop in rows for leaf in range(first, stop))
    assert list(range(micro_batches)) == leaves
    assert all(set(mine) <= set(had) for mine, had in zip(kept, held, strict=True))


def test_a_node_that_another_one_contains_does_not_count_and_its_neighbour_does():
    assert [[(0, 4)], [(4, 6)]] == choose_kept([[(0, 4)], [(2, 4), (4, 6)]], micro_batches=8)


@pytest.mark.parametrize("bad", [(1, 3), (0, 3), (4, 4), (6, 4), (8, 16)])
def test_what_is_no_node_of_the_tree_is_not_counted(bad):
    assert [[]] == choose_kept([[bad]], micro_batches=8)


def test_a_member_at_a_quarter_of_the_speed_gets_a_quarter_of_the_leaves():
    assert [(0, 4), (4, 8), (8, 12), (12, 13)] == blocks_of(13, [0.1, 0.1, 0.1, 0.4])


def test_members_of_unknown_speed_get_equal_blocks():
    assert [(0, 3), (3, 5)] == blocks_of(5, [0.1, None])


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_ends_earlier(seed):
    rng = random.Random(seed)  # noqa: S311 - cases to try, no secret
    paces = [rng.uniform(0.1, 1.0) for _ in range(3)]
    count = rng.randint(3, 9)
    best = min(
        max(a * paces[0], b * paces[1], (count - a - b) * paces[2])
        for a in range(1, count)
        for b in range(1, count - a)
    )
    assert best == pytest.approx(step_seconds(blocks_of(count, paces), dict(enumerate(paces))))


@pytest.mark.parametrize("seed", range(20))
def test_each_piece_goes_to_the_member_that_ends_first_with_it_and_of_equal_ones_to_the_first(seed):
    rng = random.Random(seed)  # noqa: S311 - cases to try, no secret
    paces = [rng.choice([0.1, 0.2, 0.3, rng.random()]) for _ in range(rng.randint(1, 6))]
    least = rng.randint(0, 1)
    counts = [least] * len(paces)
    for _ in range(30 - sum(counts)):
        counts[min(range(len(paces)), key=lambda place: ((counts[place] + 1) * paces[place], place))] += 1
    assert counts == share(30, paces, least=least)


def test_fewer_leaves_than_members_is_an_error():
    with pytest.raises(ValueError, match="2 micro-batches are too few for 3 members"):
        share(2, [None, None, None], least=1)
