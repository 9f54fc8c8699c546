"""Hops between meshes over the links of the mesh graph."""

import pytest

from ttlaunch.plan.graph import mesh_hops, neighbours


def test_hops_count_the_links_of_a_shortest_path(cluster):
    hops = mesh_hops(cluster([(0, 1), (1, 2), (2, 3), (0, 4), (4, 3)]))
    assert {0: 0, 1: 1, 2: 2, 3: 2, 4: 1} == dict(hops[0])


def test_a_mesh_without_a_path_is_left_out(cluster):
    hops = mesh_hops(cluster([(0, 1), (2, 3)]))
    assert {0: 0, 1: 1} == dict(hops[0])
    assert {2: 1, 3: 0} == dict(hops[3])


def test_neighbours_are_in_the_order_of_their_ids(cluster):
    assert {0: [1, 2, 3], 1: [0], 2: [0], 3: [0]} == neighbours(cluster([(0, 3), (0, 1), (0, 2)]))


@pytest.mark.parametrize("size", [2, 3, 5, 64])
def test_hops_are_symmetric_and_grow_along_a_chain(cluster, size):
    hops = mesh_hops(cluster([(i, i + 1) for i in range(size - 1)]))
    assert all(hops[a][b] == abs(a - b) for a in range(size) for b in range(size))
