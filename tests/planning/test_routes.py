"""The links that messages cross: shortest paths, the widest of them, and the ports of hosts (E9)."""

from dataclasses import replace

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.planning.routes import network_of, routes_between


def test_a_message_takes_the_widest_of_the_shortest_paths():
    """0 to 3 over 1 or over 2; the way over 2 has a channel more, and the one over 4 and 5 is longer."""
    links = [(0, 1, 2.0), (1, 3, 1.0), (0, 2, 2.0), (2, 3, 2.0), (0, 4, 9.0), (4, 5, 9.0), (5, 3, 9.0)]
    routes = routes_between(links)
    assert ((4, 6), (7, 5)) == (routes[0, 3], routes[3, 0])
    assert (8, 10) == routes[0, 5]


def test_of_equal_paths_the_first_in_the_file_is_taken_and_parts_without_a_path_have_no_route():
    routes = routes_between([(0, 1, 1.0), (0, 2, 1.0), (1, 3, 1.0), (2, 3, 1.0), (8, 9, 1.0)])
    assert (0, 4) == routes[0, 3]
    assert (0, 9) not in routes
    assert {(8, 9), (9, 8)} <= routes.keys()


@pytest.fixture
def plan():
    return plan_simulation(RunSpec("data_parallel", on="5loudboxes", overrides=WORKERS), Unattended())


WORKERS = ("multihost_config.num_workers=5",)


def test_only_sockets_that_send_along_the_links_use_them(plan):
    fabric = plan_simulation(
        RunSpec("data_parallel", on="5loudboxes", overrides=(*WORKERS, "multihost_config.socket_type=fabric")),
        Unattended(),
    )
    assert network_of(plan) is None  # each host has one rank, and so each rank has a port of its own
    found = network_of(fabric)
    assert found == network_of(plan, over_links=True)
    assert len(found.capacities) == len(plan.links)
    assert {len(route) for route in found.routes.values()} >= {1}


def test_ranks_of_a_host_share_its_port(plan):
    rows = tuple(replace(row, host="one" if row.rank < 3 else "two") for row in plan.ranks)
    found = network_of(replace(plan, ranks=rows))
    assert ((0, 0, 0, 1, 1), {(0, 1): (0, 3), (1, 0): (2, 1)}) == (found.places, found.routes)
    assert 1.0 == sum(found.hops[link // 2] for link in found.routes[0, 1])
