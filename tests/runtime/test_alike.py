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
