"""Links between ports (release 0.63), and rules for links, rings and ports of descriptors of version 1."""

from ttlaunch.spec.topology.model import Link

START = """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [{name: box, type: Mesh, topology: [2, 4]}]
Mesh: [
  {id: 0, board: box, device_topology: [2, 4], host_topology: [1, 1]},
  {id: 1, board: box, device_topology: [2, 4], host_topology: [1, 1]},
]
"""
PORTS = """\
Graph: [
  [[0, E0], [1, W0]],
  [[0, E3], [1, W1]],
  [[1, W0], [0, E0]],
  [[1, W1], [0, E3]],
]
"""


def test_links_between_ports_become_links_between_devices(load):
    topology = load({"mgd.yaml": START + PORTS}).topology
    (link,) = topology.links
    assert (link.a, link.b, link.channels, link.policy) == (0, 1, 2, "STRICT")
    assert link.devices == ((3, 0, 1), (7, 0, 1))
    assert isinstance(link, Link)


def test_ports_of_the_north_and_south_are_counted_by_column(load):
    text = PORTS.replace("E", "S").replace("W", "N")
    (link,) = load({"mgd.yaml": START + text}).topology.links
    assert link.devices == ((4, 0, 1), (5, 0, 1))


def test_a_link_of_ports_without_its_way_back_is_refused(check):
    expected = """\
error[T043]: the link from E0 of mesh 0 to W0 of mesh 1 is given in one direction only
 --> mgd.yaml:8:3
  |
8 |   [[0, E0], [1, W0]],
  |   ^^^^^^^^^^^^^^^^^^ its way back is missing

hint: add `[[1, W0], [0, E0]]`
"""
    check({"mgd.yaml": START + "Graph: [\n  [[0, E0], [1, W0]],\n]\n"}, expected)


def test_a_port_past_the_edge_is_refused(check):
    expected = """\
error[T044]: a link names port E4 of mesh 0, whose east edge has 4
 --> mgd.yaml:8:8
  |
8 |   [[0, E4], [1, W0]],
  |        ^^ expected E0 to E3
 --> mgd.yaml:4:8
  |
4 |   {id: 0, board: box, device_topology: [2, 4], host_topology: [1, 1]},
  |        - 2 × 4 devices, 2 ports each
  = note: the same again in line 9
"""
    check({"mgd.yaml": START + "Graph: [\n  [[0, E4], [1, W0]],\n  [[1, W0], [0, E4]],\n]\n"}, expected)


def test_a_direction_without_ports_is_refused(check):
    expected = """\
error[T044]: a link names port Z0 of mesh 0, whose Z side has 0
 --> mgd.yaml:8:8
  |
8 |   [[0, Z0], [1, W0]],
  |        ^^ no port there
 --> mgd.yaml:4:8
  |
4 |   {id: 0, board: box, device_topology: [2, 4], host_topology: [1, 1]},
  |        - 2 × 4 devices, 0 ports each
  = note: the same again in line 9
"""
    check({"mgd.yaml": START + "Graph: [\n  [[0, Z0], [1, W0]],\n  [[1, W0], [0, Z0]],\n]\n"}, expected)


def test_a_port_with_two_links_is_refused(check):
    expected = """\
error[T033]: port E0 of mesh 0 has two links
  --> mgd.yaml:10:4
   |
10 |   [[0, E0], [1, W1]],
   |    ^^^^^^^ one port has one cable
  --> mgd.yaml:8:4
   |
 8 |   [[0, E0], [1, W0]],
   |    ------- the other is here
"""
    check(
        {"mgd.yaml": START + "Graph: [\n  [[0, E0], [1, W0]],\n  [[1, W0], [0, E0]],\n  [[0, E0], [1, W1]],\n]\n"},
        expected,
    )


def test_a_link_of_ports_twice_is_refused(check):
    expected = """\
error[T033]: the link from E0 of mesh 0 to W0 of mesh 1 is given twice
  --> mgd.yaml:10:3
   |
10 |   [[0, E0], [1, W0]],
   |   ^^^^^^^^^^^^^^^^^^ and again here
  --> mgd.yaml:8:3
   |
 8 |   [[0, E0], [1, W0]],
   |   ------------------ first given here
"""
    check(
        {"mgd.yaml": START + "Graph: [\n  [[0, E0], [1, W0]],\n  [[1, W0], [0, E0]],\n  [[0, E0], [1, W0]],\n]\n"},
        expected,
    )


def test_a_port_of_a_missing_mesh_is_refused(check):
    expected = """\
error[T031]: a link names mesh 2, which does not exist
 --> mgd.yaml:8:14
  |
8 |   [[0, E0], [2, W0]],
  |              ^ no mesh has id 2
"""
    check({"mgd.yaml": START + "Graph: [\n  [[0, E0], [2, W0]],\n]\n"}, expected)


def test_a_link_of_ports_of_one_mesh_is_refused(check):
    expected = """\
error[T032]: a link connects mesh 0 to itself
 --> mgd.yaml:8:13
  |
8 |   [[0, E0], [0, W0]],
  |             ^^^^^^^ expected another mesh
"""
    check({"mgd.yaml": START + "Graph: [\n  [[0, E0], [0, W0]],\n]\n"}, expected)


def test_a_link_of_ports_with_channels_is_refused(check):
    expected = """\
error[T005]: a link is a list of 3; `[[0, E0], [1, W0]]` was expected, as in the other links
 --> mgd.yaml:8:3
  |
8 |   [[0, E0], [1, W0], 2],
  |   ^^^^^^^^^^^^^^^^^^^^^ expected `[[0, E0], [1, W0]]`
"""
    check({"mgd.yaml": START + "Graph: [\n  [[0, E0], [1, W0], 2],\n]\n"}, expected)


def test_an_end_that_is_no_port_is_refused(check):
    expected = """\
error[T005]: an end of a link is not a mesh and a port; `[[0, E0], [1, W0]]` was expected
 --> mgd.yaml:8:13
  |
8 |   [[0, E0], [1, Q0]],
  |             ^^^^^^^ expected a mesh and a port such as `[0, E0]`
"""
    check({"mgd.yaml": START + "Graph: [\n  [[0, E0], [1, Q0]],\n]\n"}, expected)


def test_more_channels_than_an_edge_has_ports_are_refused(check):
    expected = """\
error[T041]: mesh 0 has 25 channels to other meshes but 24 ports at its edge
 --> mgd.yaml:7:16
  |
7 | RelaxedGraph: [[M0, M1, 25]]
  |                ^^^^^^^^^^^^
 --> mgd.yaml:4:8
  |
4 |   {id: 0, board: box, device_topology: [2, 4], host_topology: [1, 1]},
  |        - 2 × 4 devices
"""
    check({"mgd.yaml": START + "RelaxedGraph: [[M0, M1, 25]]\n"}, expected)


def test_more_channels_than_a_device_has_free_ports_are_refused(check):
    expected = """\
error[T041]: device 1 of mesh 0 has 3 channels to other meshes but 2 free ports
 --> mgd.yaml:8:3
  |
8 |   [[M0, D1], [M1, D1], 3],
  |   ^^^^^^^^^^^^^^^^^^^^^^^
 --> mgd.yaml:4:8
  |
4 |   {id: 0, board: box, device_topology: [2, 4], host_topology: [1, 1]},
  |        - 2 × 4 devices
"""
    check({"mgd.yaml": START + "Graph: [\n  [[M0, D1], [M1, D1], 3],\n]\n"}, expected)


def test_a_ring_of_two_leaves_the_ports_at_its_ends_free(load):
    text = START.replace("type: Mesh", "type: TORUS_XY")
    assert ["T042"] == [each.code for each in load({"mgd.yaml": text + "RelaxedGraph: [[M0, M1, 16]]\n"}).diagnostics]
    assert ["T042"] == [
        each.code for each in load({"mgd.yaml": text + "Graph: [[[M0, D1], [M1, D1], 2]]\n"}).diagnostics
    ]
    more = load({"mgd.yaml": text + "RelaxedGraph: [[M0, M1, 17]]\n"}).diagnostics
    assert "mesh 0 has 17 channels to other meshes but 16 ports at its edge" in [each.message for each in more]


def test_as_many_channels_as_ports_are_fine(load):
    assert load({"mgd.yaml": START + "RelaxedGraph: [[M0, M1, 24]]\n"}).diagnostics == []
    assert load({"mgd.yaml": START + "Graph: [[[M0, D1], [M1, D1], 2], [[M0, D0], [M1, D0], 4]]\n"}).diagnostics == []
