"""Choose the owners and shadows of the slots of a state that is cut, by place and host."""

from itertools import product

import pytest

from ttlaunch.membership.messages import Share
from ttlaunch.membership.slots import covering_cut, divide_slots, sources_of

HOSTS = [list(hosts) for count in range(1, 7) for hosts in product("abc", repeat=count)]


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_on_one_host_each_member_owns_a_slot_and_shadows_another_one(count):
    slots = divide_slots(["box"] * count)
    assert tuple(range(count)) == slots.owners
    assert list(range(count)) == sorted(slots.shadows)
    assert all(owner != shadow for owner, shadow in zip(slots.owners, slots.shadows, strict=True))


def test_with_any_hosts_each_member_shadows_one_slot_of_another_member():
    for hosts in HOSTS[3:]:
        if len(hosts) > 1:
            slots = divide_slots(hosts)
            assert list(range(len(hosts))) == sorted(slots.shadows)
            assert not any(place == shadow for place, shadow in enumerate(slots.shadows))


def test_the_shadow_is_on_another_host_wherever_no_host_has_more_than_half_of_the_members():
    for hosts in HOSTS:
        if 2 * max(map(hosts.count, hosts)) <= len(hosts):
            slots = divide_slots(hosts)
            assert all(hosts[place] != hosts[shadow] for place, shadow in enumerate(slots.shadows)), hosts


def test_of_a_host_with_more_than_half_of_the_members_as_many_as_possible_have_a_shadow_elsewhere():
    for hosts in HOSTS:
        most, others = max(map(hosts.count, hosts)), len(hosts) - max(map(hosts.count, hosts))
        if most > others > 0:
            slots = divide_slots(hosts)
            elsewhere = sum(hosts[place] != hosts[shadow] for place, shadow in enumerate(slots.shadows))
            assert 2 * others == elsewhere, hosts


def test_one_member_has_everything_and_no_shadow():
    slots = divide_slots(["box"])
    assert (Share(1, (0,)), (None,)) == (slots.of(0), slots.shadows)


def test_a_share_names_the_slot_that_is_owned_first():
    slots = divide_slots(["a", "a", "b"])
    assert [share.slots[0] for share in map(slots.of, range(3))] == [0, 1, 2]
    assert {0, 1, 2} == {share.slots[1] for share in map(slots.of, range(3))}


def test_a_single_slot_is_owned_at_place_0_and_shadowed_at_place_1():
    slots = divide_slots(["a", "a", "b", "b"], slots=1)
    assert [Share(1, (0,)), Share(1, (0,)), Share(1), Share(1)] == [slots.of(place) for place in range(4)]


def test_as_many_slots_as_servers_are_shadowed_by_servers():
    slots = divide_slots(["a", "b", "c", "c"], slots=2)
    assert [Share(2, (0, 1)), Share(2, (1, 0)), Share(2), Share(2)] == [slots.of(place) for place in range(4)]


def test_a_state_is_covered_only_by_all_slots_of_one_cut():
    assert covering_cut([(Share(3, (0, 1)),), (Share(3, (1, 2)),)]) == 3
    assert covering_cut([(Share(3, (0, 1)),), (Share(2, (1,)), Share(3, (1, 0)))]) is None
    assert covering_cut([(Share(3, (0, 1)), Share(2, (0,))), (Share(2, (1, 0)),)]) == 2
    assert covering_cut([()]) is None


def test_the_sources_of_a_slot_are_the_places_that_have_it():
    assert [0, 3] == sources_of(1, [Share(3, (0, 1)), None, Share(3), Share(3, (1, 2))])
