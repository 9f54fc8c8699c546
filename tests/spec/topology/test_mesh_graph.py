"""What is said about mistakes in `mgd.yaml`."""


def test_an_unknown_key_of_the_file_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
Switch: []
"""
    }
    expected = """\
error[T004]: unknown key `Switch` in a mesh graph descriptor
  --> mgd.yaml:10:1
   |
10 | Switch: []
   | ^^^^^^ expected `Graph`
"""
    check(files, expected)


def test_an_unknown_key_of_a_mesh_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1], hosts: 1},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T004]: unknown key `hosts` in a mesh
 --> mgd.yaml:7:72
  |
7 |   {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1], hosts: 1},
  |                                                                        ^^^^^ expected `id`, `board`, `device_topology` or `host_topology`
"""
    check(files, expected)


def test_an_unknown_direction_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, X: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T006]: `W` is missing in `ethernet_ports`
 --> mgd.yaml:1:31
  |
1 | ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, X: 2}}
  |                               ^^^^^^^^^^^^^^ has no `W`

error[T004]: unknown key `X` in `ethernet_ports`
 --> mgd.yaml:1:66
  |
1 | ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, X: 2}}
  |                                                                  ^ expected `W` or `Z`
"""
    check(files, expected)


def test_a_missing_section_is_named(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T006]: `Board` is missing in a mesh graph descriptor
 --> mgd.yaml:1:1
  |
1 | ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
  | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ has no `Board`
"""
    check(files, expected)


def test_an_unknown_architecture_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b1, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T005]: `arch` is `wormhole_b1`; `wormhole_b0`, `blackhole`, `quasar`, `cpu` or `cuda` was expected
 --> mgd.yaml:1:18
  |
1 | ChipSpec: {arch: wormhole_b1, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
  |                  ^^^^^^^^^^^ expected `wormhole_b0`, `blackhole`, `quasar`, `cpu` or `cuda`

hint: did you mean `wormhole_b0`?
"""
    check(files, expected)


def test_an_unknown_kind_of_board_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: TORUS_Z, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T005]: `type` is `TORUS_Z`; `Mesh`, `TORUS_X`, `TORUS_Y` or `TORUS_XY` was expected
 --> mgd.yaml:3:22
  |
3 |   {name: lbox, type: TORUS_Z, topology: [1, 8]},
  |                      ^^^^^^^ expected `Mesh`, `TORUS_X`, `TORUS_Y` or `TORUS_XY`

hint: did you mean `TORUS_X`?
"""
    check(files, expected)


def test_uneven_ports_are_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 3, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T037]: `ethernet_ports` differ per direction: N: 2, E: 2, S: 3, W: 2
 --> mgd.yaml:1:63
  |
1 | ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 3, W: 2}}
  |                                                               ^ expected 2, as in the others
"""
    check(files, expected)


def test_a_topology_of_three_is_refused(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8, 1], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T005]: `device_topology` is a list of 3 items; at most 2 items were expected
 --> mgd.yaml:7:24
  |
7 |   {id: 1, board: lbox, device_topology: [1, 8, 1], host_topology: [1, 1]},
  |                        ^^^^^^^^^^^^^^^ expected at most 2 items
"""
    check(files, expected)


def test_a_topology_of_one_is_refused(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T005]: `topology` is a list of 1 item; at least 2 items were expected
 --> mgd.yaml:3:28
  |
3 |   {name: lbox, type: Mesh, topology: [8]},
  |                            ^^^^^^^^ expected at least 2 items
"""
    check(files, expected)


def test_a_topology_with_a_zero_is_refused(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [0, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T005]: item 1 of `topology` is `0`; a number of at least 1 was expected
 --> mgd.yaml:3:39
  |
3 |   {name: lbox, type: Mesh, topology: [0, 8]},
  |                                       ^ expected a number of at least 1
"""
    check(files, expected)


def test_a_text_in_a_topology_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, x], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T005]: item 2 of `device_topology` is `x`; a whole number was expected
 --> mgd.yaml:7:45
  |
7 |   {id: 1, board: lbox, device_topology: [1, x], host_topology: [1, 1]},
  |                                             ^ expected a whole number
"""
    check(files, expected)


def test_no_meshes_are_not_enough(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
]
"""
    }
    expected = """\
error[T005]: `Mesh` is an empty list; at least 1 item was expected
 --> mgd.yaml:5:1
  |
5 | Mesh: [
  | ^^^^ expected at least 1 item
"""
    check(files, expected)


def test_a_mesh_defined_twice_points_at_both_places(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T029]: mesh 1 is defined twice
 --> mgd.yaml:8:8
  |
8 |   {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  |        ^ and again here
 --> mgd.yaml:7:8
  |
7 |   {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  |        - first defined here
"""
    check(files, expected)


def test_a_gap_in_the_mesh_ids_is_a_warning(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 2, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: []
""",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 2}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
warning[T030]: mesh ids have a gap: there is a mesh 2 but no mesh 1
 --> mgd.yaml:7:8
  |
7 |   {id: 2, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  |        ^ expected 1
"""
    check(files, expected)


def test_a_missing_board_is_named(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbx, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T034]: a mesh is made of board `lbx`, which does not exist
 --> mgd.yaml:7:18
  |
7 |   {id: 1, board: lbx, device_topology: [1, 8], host_topology: [1, 1]},
  |                  ^^^ expected `lbox`

hint: did you mean `lbox`?
"""
    check(files, expected)


def test_a_board_defined_twice_points_at_both_places(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T035]: board `lbox` is defined twice
 --> mgd.yaml:4:10
  |
4 |   {name: lbox, type: Mesh, topology: [1, 8]},
  |          ^^^^ and again here
 --> mgd.yaml:3:10
  |
3 |   {name: lbox, type: Mesh, topology: [1, 8]},
  |          ---- first defined here
"""
    check(files, expected)


def test_a_shape_that_is_not_hosts_times_board_shows_the_product(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [3, 5], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T036]: a mesh has device_topology [3, 5], but its hosts make [1, 8]
 --> mgd.yaml:7:41
  |
7 |   {id: 1, board: lbox, device_topology: [3, 5], host_topology: [1, 1]},
  |                                         ^^^^^^ hosts [1, 1] × board [1, 8] = [1, 8]
 --> mgd.yaml:7:64
  |
7 |   {id: 1, board: lbox, device_topology: [3, 5], host_topology: [1, 1]},
  |                                                                ------ 1 × 1 hosts
 --> mgd.yaml:3:38
  |
3 |   {name: lbox, type: Mesh, topology: [1, 8]},
  |                                      ------ 1 × 8 devices on a board
"""
    check(files, expected)


def test_a_link_to_a_missing_mesh_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [
  [M0, M2, 2],
]
"""
    }
    expected = """\
error[T031]: a link names mesh 2, which does not exist
  --> mgd.yaml:10:8
   |
10 |   [M0, M2, 2],
   |        ^^ no mesh has id 2
"""
    check(files, expected)


def test_a_link_of_a_mesh_to_itself_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [
  [M0, M0, 2],
]
"""
    }
    expected = """\
error[T032]: a link connects mesh 0 to itself
  --> mgd.yaml:10:8
   |
10 |   [M0, M0, 2],
   |        ^^ expected another mesh
"""
    check(files, expected)


def test_a_link_given_twice_points_at_both_places(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [
  [M0, M1, 2],
  [M1, M0, 4],
]
"""
    }
    expected = """\
error[T033]: the link between mesh 0 and mesh 1 is given twice
  --> mgd.yaml:11:3
   |
11 |   [M1, M0, 4],
   |   ^^^^^^^^^^^ and again here
  --> mgd.yaml:10:3
   |
10 |   [M0, M1, 2],
   |   ----------- first given here
"""
    check(files, expected)


def test_a_link_without_channels_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [
  [M0, M1, 0],
]
"""
    }
    expected = """\
error[T005]: a link has `0` channels; at least 1 was expected
  --> mgd.yaml:10:12
   |
10 |   [M0, M1, 0],
   |            ^ expected at least 1
"""
    check(files, expected)


def test_a_link_of_two_items_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [
  [M0, M1],
]
"""
    }
    expected = """\
error[T005]: a link is a list of 2; `[M0, M1, 2]` was expected
  --> mgd.yaml:10:3
   |
10 |   [M0, M1],
   |   ^^^^^^^^ expected `[M0, M1, 2]`
"""
    check(files, expected)


def test_a_link_of_numbers_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [
  [0, 1, 2],
]
"""
    }
    expected = """\
error[T005]: a link names `0`; a mesh such as `M0` was expected
  --> mgd.yaml:10:4
   |
10 |   [0, 1, 2],
   |    ^ expected a mesh such as `M0`, as in `[M0, M1, 2]`
"""
    check(files, expected)


def test_a_link_that_is_no_list_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [
  M0,
]
"""
    }
    expected = """\
error[T005]: a link is no list; `[M0, M1, 2]` was expected
  --> mgd.yaml:10:3
   |
10 |   M0,
   |   ^^ expected `[M0, M1, 2]`
"""
    check(files, expected)


def test_a_graph_that_is_no_list_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: M0
"""
    }
    expected = """\
error[T005]: `RelaxedGraph` is `M0`; a list was expected
 --> mgd.yaml:9:15
  |
9 | RelaxedGraph: M0
  |               ^^ expected a list
"""
    check(files, expected)


def test_a_device_that_the_mesh_does_not_have_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
Graph: [
  [[M0, D8], [M1, D0], 1],
]
"""
    }
    expected = """\
error[T038]: a link names device 8 of mesh 0, which has 8 devices
  --> mgd.yaml:10:4
   |
10 |   [[M0, D8], [M1, D0], 1],
   |    ^^^^^^^^ expected D0 to D7
"""
    check(files, expected)


def test_an_end_without_a_device_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
Graph: [
  [M0, [M1, D0], 1],
]
"""
    }
    expected = """\
error[T005]: an end of a link in `Graph` is not a mesh and a device; `[[M0, D1], [M1, D1], 1]` was expected
  --> mgd.yaml:10:4
   |
10 |   [M0, [M1, D0], 1],
   |    ^^ expected `[[M0, D1], [M1, D1], 1]`
"""
    check(files, expected)


def test_an_odd_device_is_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
Graph: [
  [[M0, X1], [M1, D0], 1],
]
"""
    }
    expected = """\
error[T005]: a link names `X1`; a device such as `D1` was expected
  --> mgd.yaml:10:9
   |
10 |   [[M0, X1], [M1, D0], 1],
   |         ^^ expected a device such as `D1`, as in `[[M0, D1], [M1, D1], 1]`
"""
    check(files, expected)


def test_a_link_of_devices_given_twice_points_at_both_places(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
Graph: [
  [[M0, D1], [M1, D1], 1],
  [[M1, D1], [M0, D1], 1],
]
"""
    }
    expected = """\
error[T033]: the link between device 1 of mesh 0 and device 1 of mesh 1 is given twice
  --> mgd.yaml:11:3
   |
11 |   [[M1, D1], [M0, D1], 1],
   |   ^^^^^^^^^^^^^^^^^^^^^^^ and again here
  --> mgd.yaml:10:3
   |
10 |   [[M0, D1], [M1, D1], 1],
   |   ----------------------- first given here
"""
    check(files, expected)


def test_links_in_both_graphs_are_refused(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
Graph: [[[M0, D1], [M1, D1], 1]]
"""
    }
    expected = """\
error[T028]: the descriptor has both `RelaxedGraph` and `Graph`; one of them was expected
  --> mgd.yaml:10:1
   |
10 | Graph: [[[M0, D1], [M1, D1], 1]]
   | ^^^^^
  --> mgd.yaml:9:1
   |
 9 | RelaxedGraph: [[M0, M1, 2]]
   | ------------ the other is here
"""
    check(files, expected)


def test_an_empty_graph_beside_the_other_is_refused(check, good):
    expected = """\
error[T028]: the descriptor has both `RelaxedGraph` and `Graph`; one of them was expected
  --> mgd.yaml:12:1
   |
12 | Graph: []
   | ^^^^^
  --> mgd.yaml:9:1
   |
 9 | RelaxedGraph: [
   | ------------ the other is here

hint: remove `Graph`, which has no links
"""
    check({"mgd.yaml": good["mgd.yaml"] + "Graph: []\n"}, expected)


def test_a_descriptor_without_a_graph_is_refused(check, good):
    expected = """\
error[T006]: the descriptor has neither `RelaxedGraph` nor `Graph`; one of them was expected
 --> mgd.yaml:1:1
  |
1 | ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
  | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ has no links

hint: write `RelaxedGraph: []` if no links join the meshes
"""
    check({"mgd.yaml": good["mgd.yaml"].partition("RelaxedGraph")[0]}, expected)


def test_generation_a_is_named(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, topology: [1, 8], host_ranks: [[0]]},
]
Graph: []
"""
    }
    expected = """\
error[T026]: mgd.yaml is a mesh graph descriptor of generation A (before release 0.62), which is not read
 --> mgd.yaml:6:24
  |
6 |   {id: 0, board: lbox, topology: [1, 8], host_ranks: [[0]]},
  |                        ^^^^^^^^ a mesh has `topology`

hint: replace `topology` in each mesh by `device_topology`, and `host_ranks` by `host_topology: [rows, columns]`

hint: write links as `RelaxedGraph: [[M0, M1, 2]]`: two meshes and their number of channels, each pair once

hint: or rewrite it with `ttlaunch convert`
"""
    check(files, expected)


def test_generation_b_is_named(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1], host_ranks: [[0]]},
]
Graph: []
"""
    }
    expected = """\
error[T026]: mgd.yaml is a mesh graph descriptor of generation B (release 0.62), which is not read
 --> mgd.yaml:6:72
  |
6 |   {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1], host_ranks: [[0]]},
  |                                                                        ^^^^^^^^^^ a mesh has `host_ranks`

hint: remove `host_ranks` from each mesh; `host_topology` means the same

hint: write links as `RelaxedGraph: [[M0, M1, 2]]`: two meshes and their number of channels, each pair once

hint: or rewrite it with `ttlaunch convert`
"""
    check(files, expected)


def test_a_file_that_is_a_word_is_refused(check):
    files = {"mgd.yaml": "wormhole\n"}
    expected = """\
error[T005]: the file is `wormhole`; keys and values were expected
 --> mgd.yaml:1:1
  |
1 | wormhole
  | ^^^^^^^^ expected keys and values
"""
    check(files, expected)


def test_two_documents_are_refused(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
---
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
    }
    expected = """\
error[T008]: mgd.yaml holds two documents; one was expected
  --> mgd.yaml:10:1
   |
10 | ---
   | ^ the second one begins here
"""
    check(files, expected)
