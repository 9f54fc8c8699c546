"""Max-min fair rates, against their definition."""

import math
import random

import pytest

from ttlaunch.runtime.comm.fair_network import FairNetwork, fair_rates
from ttlaunch.runtime.comm.flow_table import Flow, FlowTable


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
    assert (2.0, [short]) == network.share(0.0)
    network.end(short)
    assert (4.0, [long]) == network.share(2.0)


def random_loads(numbers):
    """Return what flows share: many pass through one port, some through more ports than others, some count several times."""
    places = ["server", *(f"port{number}" for number in range(40))]
    weights = [20, *[1] * 40]
    return [
        dict.fromkeys(dict.fromkeys(numbers.choices(places, weights, k=numbers.randint(1, 4))), numbers.randint(1, 3))
        for _ in range(120)
    ]


@pytest.mark.parametrize("seed", range(2))
def test_many_flows_in_arrays_have_exactly_the_rates_and_times_of_flows_one_by_one(seed):
    numbers = random.Random(seed)  # noqa: S311 - the same numbers in every run
    capacity = {f"port{number}": numbers.choice([0.1, 0.7, 3.0]) for number in range(40)} | {"server": 0.9}
    loads, sizes = random_loads(numbers), [numbers.uniform(0.1, 9.0) for _ in range(120)]
    network = FairNetwork(capacity.__getitem__)
    plain = {}
    now_s, left = 0.0, list(range(120))
    most = 0
    while left or plain:
        for number in left[: numbers.randint(0, 40)]:
            left.remove(number)
            flow, same = (Flow(loads[number], sizes[number], lambda _: None) for _ in range(2))
            network.begin(flow, now_s=now_s)
            plain[flow], same.since_s = same, now_s
        rates = fair_rates(plain.values(), capacity.__getitem__)
        for same in plain.values():
            if rates[same] != same.rate:
                same.left = max(0.0, same.left - same.rate * (now_s - same.since_s))
                same.rate, same.since_s = rates[same], now_s
                same.passes_s = now_s + same.left / same.rate
        most = max(most, len(plain))
        next_s = min((same.passes_s for same in plain.values()), default=math.inf)
        passing = [flow for flow, same in plain.items() if same.passes_s == next_s]
        assert (next_s, passing) == network.share(now_s)
        for flow in passing:
            network.end(flow)
            del plain[flow]
        now_s = next_s if plain or passing else now_s
    assert most > 64  # so there were arrays


def test_a_table_of_flows_tells_what_it_knows_when_they_are_few_again():
    flows = [flow("port", left=float(number)) for number in range(1, 41)]
    table = FlowTable(flows, lambda _: 40.0)
    assert (1.0, flows[:1]) == table.share(0.0)
    table.remove(flows[0])
    table.share(1.0)
    table.write_back(flows[1:])
    assert [(number - 1.0, 40.0 / 39.0, 1.0) for number in range(2, 41)] == [
        (one.left, one.rate, one.since_s) for one in flows[1:]
    ]
