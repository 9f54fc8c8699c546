"""Clusters that several tests read; those whose lines a diagnostic quotes stand beside it."""

WIDE = """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [2, 8], host_topology: [2, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [
  [M0, M1, 2],
]
"""
"""A mesh that two hosts share, and one of a single host."""

WIDE_BINDINGS = """\
rank_bindings:
  - {rank: 0, mesh_id: 0, mesh_host_rank: 0}
  - {rank: 1, mesh_id: 0, mesh_host_rank: 1}
  - {rank: 2, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
