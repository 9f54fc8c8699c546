"""Which ranks a flow makes talk to each other."""

import pytest

from ttlaunch.plan.roles import pairs
from ttlaunch.recipe import all_pairs, chain
from ttlaunch.recipe.declare import Flow


@pytest.mark.parametrize(
    ("flow", "roles", "expected"),
    [
        (Flow("worker", "aggregator"), "worker worker aggregator", [(0, 2), (1, 2)]),
        (Flow("aggregator", "optimizer"), "worker aggregator optimizer", [(1, 2)]),
        (Flow("worker", "aggregator"), "worker optimizer", []),
        (chain("stage"), "stage stage stage", [(0, 1), (1, 2)]),
        (chain("stage"), "stage", []),
        (all_pairs("peer"), "peer peer peer", [(0, 1), (0, 2), (1, 2)]),
        (all_pairs("peer"), "peer", []),
        (Flow("client", "server"), "client server client server", [(0, 1), (0, 3), (2, 1), (2, 3)]),
    ],
    ids=["fan-in", "one-to-one", "absent", "chain", "short-chain", "all", "alone", "many-to-many"],
)
def test_a_flow_joins_the_ranks_of_its_roles(flow, roles, expected):
    assert list(pairs(flow, roles.split())) == expected
