"""What the description of a cluster says once hosts are gone: cabled meshes go with their host, nobody inherits them."""

import pytest

from tests.spec.topology.clusters import WIDE, WIDE_BINDINGS
from ttlaunch.spec.topology.without_hosts import leave_out, why_not_without

THREE = {
    "hosts.txt": "a slots=1\nb slots=2\nc slots=1\n",
    "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 2, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [
  [M0, M1, 2],
  [M1, M2, 2],
]
""",
    "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 2}
  - {rank: 1, mesh_id: 1}
  - {rank: 2, mesh_id: 0}
mesh_graph_desc_path: "mgd.yaml"
""",
}


def bound(topology):
    return [
        (binding.rank, topology.slots[binding.rank].host.name, binding.mesh_id, binding.mesh_host_rank)
        for binding in topology.bindings
    ]


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        (["a"], [(0, "b", 1, None), (1, "b", 0, None)]),
        (["b"], [(0, "a", 2, None)]),
        (["c"], [(0, "a", 2, None), (1, "b", 1, None), (2, "b", 0, None)]),
    ],
)
def test_ranks_keep_their_host_and_mesh_and_move_up(load, gone, expected):
    topology = load(THREE).topology
    assert expected == bound(leave_out(topology, gone))
    assert why_not_without(topology, gone) is None


def test_no_more_ranks_stay_bound_than_are_wanted(load):
    assert [(0, "a", 2, None)] == bound(leave_out(load(THREE).topology, ["c"], max_ranks=1))


@pytest.mark.parametrize(
    ("bindings", "gone", "expected"),
    [
        (WIDE_BINDINGS, ["a"], "mesh 0 spans several hosts and cannot be driven without one of them"),
        (WIDE_BINDINGS, ["c"], None),
        (THREE["rank_bindings.yaml"], ["a", "b"], "all 3 bound ranks ran there"),
    ],
)
def test_a_mesh_cannot_be_driven_in_part(load, bindings, gone, expected):
    files = THREE | {"rank_bindings.yaml": bindings}
    files |= {"mgd.yaml": WIDE, "hosts.txt": "a slots=1\nb slots=1\nc slots=1\n"} if bindings is WIDE_BINDINGS else {}
    loaded = load(files)
    assert loaded.topology is not None, loaded.diagnostics
    assert expected == why_not_without(loaded.topology, gone)
