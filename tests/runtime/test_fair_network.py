"""Max-min fair rates, against their definition."""

import random

from ttlaunch.runtime.comm.fair_network import FairNetwork, Flow, fair_rates


def flow(*places, left=1.0, **counts):
    return Flow({**dict.fromkeys(places, 1), **counts}, left, lambda _: None)


def test_no_rate_can_grow_without_a_slower_one_becoming_slower():
    """The definition: each flow passes through a full place in which nothing is faster."""
    numbers = random.Random(7)  # noqa: S311 - the same numbers in every run
    for _ in range(50):
        capacity = {place: numbers.choice([1.0, 2.0, 5.0]) for place in "abcdef"}
        flows = [flow(*numbers.sample("abcdef", numbers.randint(1, 3))) for _ in range(numbers.randint(1, 12))]
        rates = fair_rates(flows, capacity.__getitem__)
        used = {place: [rates[one] for one in flows if place in one.loads] for place in capacity}
        assert all(sum(found) <= capacity[place] * (1 + 1e-9) for place, found in used.items())
        for one in flows:
            full = [place for place in one.loads if sum(used[place]) >= capacity[place] * (1 - 1e-9)]
            assert any(rates[one] >= max(used[place]) * (1 - 1e-9) for place in full)


def test_many_equal_flows_and_one_that_counts_for_all_have_the_same_bits():
    """Seven senders with three messages each to servers, beside another message to each server."""
    single = [flow(f"out{sender}", f"in{server}") for sender in range(7) for server in range(3)]
    others = [flow(f"other{server}", f"in{server}") for server in range(3)]
    apart = fair_rates([*single, *others], lambda place: 0.1 if place[:5] == "other" else 0.7)
    together, other = flow(**{"out": 3, "in": 7}), flow("other", "in")
    folded = fair_rates([together, other], lambda place: 0.1 if place == "other" else 0.7)
    assert {folded[together]} == {apart[one] for one in single}
    assert {folded[other]} == {apart[one] for one in others}


def test_a_rate_grows_when_another_message_has_passed():
    network = FairNetwork(lambda _: 10.0)
    short, long = flow("port", left=10.0), flow("port", left=30.0)
    network.begin(short, now_s=0.0)
    network.begin(long, now_s=0.0)
    assert [(short, 2.0), (long, 6.0)] == network.share(0.0)
    network.end(short)
    assert [(long, 4.0)] == network.share(2.0)
