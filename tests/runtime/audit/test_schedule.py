"""The schedule of audits: everybody once, nobody themselves, and on other hosts where there are any."""

import pytest

from ttlaunch.runtime.audit.schedule import audited_place

HOSTS = ["ab", "aa", "abc", "aab", "aabb", "abab", "aabbcc", "abcde", "aaab"]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("number", range(1, 8))
def test_every_rank_is_audited_by_one_other(hosts, number):
    audited = [audited_place(place, hosts=hosts, number=number) for place in range(len(hosts))]
    assert sorted(audited) == list(range(len(hosts)))
    assert all(place != other for place, other in enumerate(audited))


@pytest.mark.parametrize("hosts", ["ab", "abc", "aabb", "abab", "aabbcc", "abcde"])
@pytest.mark.parametrize("number", range(1, 8))
def test_the_auditor_is_on_another_host_if_every_rank_can_have_such_a_one(hosts, number):
    assert all(host != hosts[audited_place(at, hosts=hosts, number=number)] for at, host in enumerate(hosts))


def test_over_several_audits_a_rank_computes_for_all_others_if_each_has_a_host_of_its_own():
    assert {1, 2, 3, 4} == {audited_place(0, hosts="abcde", number=number) for number in range(1, 5)}
