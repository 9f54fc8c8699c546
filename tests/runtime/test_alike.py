"""How ranks are divided into classes that do the same."""

from ttlaunch.runtime.alike import (
    combed_classes,
    divided,
    exchange_within_roles,
    first_classes,
    periods,
    places_within_role,
    spans,
    with_witnesses,
)


def test_a_division_begins_with_role_speed_and_share_and_the_first_of_each_role_is_alone():
    roles = ["worker"] * 5 + ["server"]
    assert ((0,), (1, 4), (2,), (3,), (5,)) == first_classes(roles, [1, 1, 1.5, 0, 1, 1])


def test_the_last_rank_of_each_class_is_its_witness():
    assert ((0,), (1, 2), (3,), (4,), (5,)) == with_witnesses(((0,), (1, 2, 3), (4, 5)))


def test_a_class_is_divided_by_what_others_have_seen_of_its_ranks_and_an_observer_joins_those_it_may_be_like():
    seen = {(0, rank): 10 + (rank > 3) for rank in range(1, 6)}
    seen |= {(1, rank): 20 + (rank > 3) for rank in (2, 3, 4, 5)}
    seen |= {(5, rank): 30 + (rank > 3) for rank in (1, 2, 3, 4)}
    assert ((0,), (1, 2, 3), (4, 5)) == divided(((0,), (1, 2, 3, 4, 5)), [1], seen)


def test_a_class_that_is_not_suspected_stays_as_it_is():
    seen = {(0, rank): rank for rank in range(1, 6)}
    assert ((0,), (1, 2), (3,), (4,), (5,)) == divided(((0,), (1, 2), (3, 4, 5)), [3], seen)


def _seen_in_pairs(pairs: int, *, cut: int, alone: tuple[int, ...] = ()) -> dict[tuple[int, int], int]:
    """Return what rank 0, and the first and the last of even and of odd ranks, have seen of their partner, and of every rank like them.

    Pairs from `cut` on have another shard, which whoever sends to many sees.
    """
    observers = {0, 1, *(pick(range(place, 2 * pairs, 2)[1:]) for place in (0, 1) for pick in (min, max)), *alone}
    partners = {(one, one ^ 1): 5 for one in observers}
    return partners | {
        (one, other): 7 + (other // 2 >= cut)
        for one in observers
        for other in range(one % 2, 2 * pairs, 2)
        if other != one
    }


def test_partners_of_ranks_that_are_divided_are_divided_with_them_and_observers_stay_with_those_like_them():
    classes = ((0,), (1,), tuple(range(2, 20, 2)), tuple(range(3, 20, 2)))
    found = divided(classes, [2], _seen_in_pairs(10, cut=6))
    assert found == ((0,), (1,), (2, 4, 6, 8, 10), (3, 5, 7, 9, 11), (12, 14, 16, 18), (13, 15, 17, 19))


def test_the_partner_of_a_rank_that_is_known_to_be_slow_is_alone_too():
    even, odd = tuple(range(2, 20, 2)), tuple(rank for rank in range(3, 20, 2) if rank != 9)
    found = divided(((0,), (1,), even, odd, (9,)), [2, 3], _seen_in_pairs(10, cut=10, alone=(9,)))
    assert found == ((0,), (1,), (2, 4, 6, 10, 12, 14, 16, 18), odd, (8,), (9,))


def test_ranks_whose_first_and_last_have_partners_at_other_distances_are_divided_by_what_is_seen_alone():
    seen = {(1, 0): 5, (6, 7): 5, (0, 1): 6, (7, 6): 6} | {(0, rank): 8 + (rank > 3) for rank in range(2, 7)}
    assert divided(((0,), (1, 2, 3, 4, 5, 6), (7,)), [1], seen) == ((0,), (1,), (2, 3), (4, 5), (6,), (7,))


def test_places_within_role_and_rows_of_ranks():
    assert [0, 0, 1] == places_within_role(["worker", "server", "worker"])
    assert [{"first": 0, "last": 1}, {"first": 4, "last": 4}] == spans([0, 1, 4])


def test_ranks_are_also_divided_by_their_places_in_a_row_that_repeats():
    roles = ["stage"] * 8
    assert [2, 3, 4] == periods(["stage"] * 12, [(0, 1)])
    served = ["worker"] * 8 + ["server"]
    assert ([], False) == (periods(served, [(0, 8), (8, 3)]), exchange_within_roles(served, [(0, 8), (8, 3)]))
    assert exchange_within_roles(served, [(0, 8), (1, 2)])
    assert ((0,), (1,), (2, 4, 6), (3, 5, 7)) == combed_classes(roles, [None] * 8, 2)
