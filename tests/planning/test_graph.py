"""Hops between meshes over the links of the mesh graph."""

from dataclasses import replace

import pytest

from ttlaunch.planning.graph import Node, hops_between
from ttlaunch.spec.topology.model import Switch, SwitchLink


def mesh_hops(topology):
    """The hops between meshes, by their ids."""
    found = hops_between(topology)
    return {
        start.id: {node.id: hops for node, hops in reached.items() if not node.is_switch}
        for start, reached in found.items()
        if not start.is_switch
    }


def test_hops_count_the_links_of_a_shortest_path(cluster):
    hops = mesh_hops(cluster([(0, 1), (1, 2), (2, 3), (0, 4), (4, 3)]))
    assert {0: 0, 1: 1, 2: 2, 3: 2, 4: 1} == dict(hops[0])


def test_a_mesh_without_a_path_is_left_out(cluster):
    hops = mesh_hops(cluster([(0, 1), (2, 3)]))
    assert {0: 0, 1: 1} == dict(hops[0])
    assert {2: 1, 3: 0} == dict(hops[3])


def test_a_way_through_switches_counts_each_of_its_links(cluster):
    topology = cluster([(0, 1)], meshes=[0, 1, 2])
    place = topology.meshes[0].span
    switches = tuple(Switch(number, f"S{number}", (1, 8), place) for number in (0, 1))
    links = (
        SwitchLink(0, 1, other_is_switch=False, channels=1, span=place),
        SwitchLink(0, 1, other_is_switch=True, channels=1, span=place),
        SwitchLink(1, 2, other_is_switch=False, channels=1, span=place),
    )
    topology = replace(topology, switches=switches, switch_links=links)
    hops = mesh_hops(topology)
    assert {0: 0, 1: 1, 2: 4} == dict(hops[0])
    assert {2: 0, 1: 3, 0: 4} == dict(hops[2])
    assert 3 == hops_between(topology)[Node(is_switch=True, id=0)][Node(is_switch=False, id=1)] + 2


@pytest.mark.parametrize("size", [2, 3, 5, 64])
def test_hops_are_symmetric_and_grow_along_a_chain(cluster, size):
    hops = mesh_hops(cluster([(i, i + 1) for i in range(size - 1)]))
    assert all(hops[a][b] == abs(a - b) for a in range(size) for b in range(size))
