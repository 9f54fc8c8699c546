"""What is said about mistakes in `rank_bindings.yaml`, alone and against the other files."""


def test_an_unknown_key_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_idd: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T004]: unknown key `mesh_idd` in a rank binding
 --> rank_bindings.yaml:2:15
  |
2 |   - {rank: 0, mesh_idd: 0}
  |               ^^^^^^^^ expected `mesh_id`, `mesh_host_rank`, `env_overrides`, `subcontext_id`, `subcontext_size` or `mesh_graph_desc_path`

hint: did you mean `mesh_id`?
"""
    check(files, expected)


def test_a_mistake_in_one_row_does_not_hide_another_row(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_idd: 0}
  - {rank: 1, mesh_id: 2}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T004]: unknown key `mesh_idd` in a rank binding
 --> rank_bindings.yaml:2:15
  |
2 |   - {rank: 0, mesh_idd: 0}
  |               ^^^^^^^^ expected `mesh_id`, `mesh_host_rank`, `env_overrides`, `subcontext_id`, `subcontext_size` or `mesh_graph_desc_path`

hint: did you mean `mesh_id`?

error[T011]: rank 1 is bound to mesh 2, which does not exist
 --> rank_bindings.yaml:3:24
  |
3 |   - {rank: 1, mesh_id: 2}
  |                        ^ no mesh has id 2
 --> mgd.yaml:5:1
  |
5 | Mesh: [
  | ---- this graph defines meshes 0, 1
"""
    check(files, expected)


def test_an_unknown_key_of_the_file_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
global_environment: {}
"""
    }
    expected = """\
error[T004]: unknown key `global_environment` in a rank bindings file
 --> rank_bindings.yaml:5:1
  |
5 | global_environment: {}
  | ^^^^^^^^^^^^^^^^^^ expected `global_env`

hint: did you mean `global_env`?
"""
    check(files, expected)


def test_a_binding_to_a_missing_mesh_points_at_both_files(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 2}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T011]: rank 1 is bound to mesh 2, which does not exist
 --> rank_bindings.yaml:3:24
  |
3 |   - {rank: 1, mesh_id: 2}
  |                        ^ no mesh has id 2
 --> mgd.yaml:5:1
  |
5 | Mesh: [
  | ---- this graph defines meshes 0, 1
"""
    check(files, expected)


def test_a_rank_bound_twice_points_at_both_places(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 0, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T017]: rank 0 is bound twice
 --> rank_bindings.yaml:3:12
  |
3 |   - {rank: 0, mesh_id: 1}
  |            ^ and again here
 --> rank_bindings.yaml:2:12
  |
2 |   - {rank: 0, mesh_id: 0}
  |            - first bound here
"""
    check(files, expected)


def test_a_gap_in_the_ranks_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 2, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T018]: ranks have a gap: there is a rank 2 but no rank 1
 --> rank_bindings.yaml:3:12
  |
3 |   - {rank: 2, mesh_id: 1}
  |            ^ expected 1
"""
    check(files, expected)


def test_ranks_begin_at_zero(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 1, mesh_id: 0}
  - {rank: 2, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T018]: ranks have a gap: there is a rank 1 but no rank 0
 --> rank_bindings.yaml:2:12
  |
2 |   - {rank: 1, mesh_id: 0}
  |            ^ expected 0
"""
    check(files, expected)


def test_more_ranks_than_slots_are_counted(check):
    files = {"hosts.txt": "a slots=1\n"}
    expected = """\
error[T019]: 2 ranks are bound but the hosts offer 1 slot
 --> rank_bindings.yaml:3:12
  |
3 |   - {rank: 1, mesh_id: 0}
  |            ^ rank 1 has no slot
 --> hosts.txt:1:3
  |
1 | a slots=1
  |   ------- 1 slot on 1 host
"""
    check(files, expected)


def test_two_ranks_on_one_mesh_are_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 0}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T020]: ranks 0 and 1 both drive mesh 0
 --> rank_bindings.yaml:3:24
  |
3 |   - {rank: 1, mesh_id: 0}
  |                        ^ rank 1
 --> rank_bindings.yaml:2:24
  |
2 |   - {rank: 0, mesh_id: 0}
  |                        - rank 0 drives it too
"""
    check(files, expected)


def test_a_host_rank_that_the_mesh_does_not_have_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1, mesh_host_rank: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T021]: rank 1 is host 1 of mesh 1, which has 1 host
 --> rank_bindings.yaml:3:43
  |
3 |   - {rank: 1, mesh_id: 1, mesh_host_rank: 1}
  |                                           ^ expected 0
 --> mgd.yaml:7:8
  |
7 |   {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  |        - 1 × 1 = 1 host
"""
    check(files, expected)


def test_ranks_of_a_mesh_that_all_leave_its_hosts_open_are_a_warning_if_there_is_one_for_each(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 16], host_topology: [1, 2]},
]
RelaxedGraph: []
""",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 0}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
warning[T021]: ranks 0 and 1 do not say which hosts of mesh 0 they are; the mesh has 2
 --> rank_bindings.yaml:2:24
  |
2 |   - {rank: 0, mesh_id: 0}
  |                        ^ has no `mesh_host_rank`
 --> mgd.yaml:6:8
  |
6 |   {id: 0, board: lbox, device_topology: [1, 16], host_topology: [1, 2]},
  |        - 1 × 2 = 2 hosts
  = note: there are as many ranks as hosts; some of the vendor's own bindings leave it open like this

hint: add `mesh_host_rank:` with a number from 0 to 1
"""
    check(files, expected)


def test_ranks_that_do_not_say_which_host_they_are_are_one_mistake(check):
    files = {
        "hosts.txt": "a\nb\nc\n",
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [{name: lbox, type: Mesh, topology: [1, 8]}]
Mesh: [{id: 0, board: lbox, device_topology: [1, 24], host_topology: [1, 3]}]
RelaxedGraph: []
""",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, mesh_host_rank: 0}
  - {rank: 1, mesh_id: 0}
  - {rank: 2, mesh_id: 0}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
error[T021]: ranks 1 and 2 do not say which hosts of mesh 0 they are; the mesh has 3
 --> rank_bindings.yaml:3:24
  |
3 |   - {rank: 1, mesh_id: 0}
  |                        ^ has no `mesh_host_rank`
 --> mgd.yaml:3:13
  |
3 | Mesh: [{id: 0, board: lbox, device_topology: [1, 24], host_topology: [1, 3]}]
  |             - 1 × 3 = 3 hosts

hint: add `mesh_host_rank:` with a number from 0 to 2
"""
    check(files, expected)


def test_ranks_that_share_a_host_and_its_devices_are_a_warning(check):
    expected = """\
warning[T064]: ranks 0 and 1 have no `TT_VISIBLE_DEVICES` on host `loudbox-01`, which they share
 --> rank_bindings.yaml:2:12
  |
2 |   - {rank: 0, mesh_id: 1}
  |            ^ sees all devices of the host
 --> rank_bindings.yaml:3:12
  |
3 |   - {rank: 1, mesh_id: 0}
  |            - runs there too

hint: name the devices of each rank in its `env_overrides`: `TT_VISIBLE_DEVICES: "0,1"`
"""
    check({"hosts.txt": "loudbox-01 slots=2\n"}, expected)


def test_a_rank_without_devices_of_its_own_beside_one_with_them_is_a_warning(load, good):
    seen = good["rank_bindings.yaml"].replace("mesh_id: 1", 'mesh_id: 1, env_overrides: {TT_VISIBLE_DEVICES: "0,1"}')
    found = load({"hosts.txt": "loudbox-01 slots=2\n", "rank_bindings.yaml": seen}).diagnostics
    message = "rank 1 has no `TT_VISIBLE_DEVICES`, and shares host `loudbox-01` with rank 0"
    assert [("T064", message)] == [(each.code, each.message) for each in found]


def test_ranks_without_tenstorrent_devices_may_share_a_host(check, good):
    check({"hosts.txt": "a slots=2\n", "mgd.yaml": good["mgd.yaml"].replace("wormhole_b0", "cpu")}, "")


def test_two_ranks_on_one_host_of_a_mesh_are_marked(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 16], host_topology: [1, 2]},
]
RelaxedGraph: []
""",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, mesh_host_rank: 1}
  - {rank: 1, mesh_id: 0, mesh_host_rank: 1}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
error[T020]: ranks 0 and 1 both drive host 1 of mesh 0
 --> rank_bindings.yaml:3:43
  |
3 |   - {rank: 1, mesh_id: 0, mesh_host_rank: 1}
  |                                           ^ rank 1
 --> rank_bindings.yaml:2:43
  |
2 |   - {rank: 0, mesh_id: 0, mesh_host_rank: 1}
  |                                           - rank 0 drives it too
"""
    check(files, expected)


def test_an_idle_mesh_is_a_warning(check):
    files = {
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
RelaxedGraph: [[M0, M1, 2], [M1, M2, 2]]
"""
    }
    expected = """\
warning[T022]: no rank drives mesh 2
 --> mgd.yaml:8:8
  |
8 |   {id: 2, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  |        ^ idle
 --> rank_bindings.yaml:1:1
  |
1 | rank_bindings:
  | ------------- these bind 2 ranks
"""
    check(files, expected)


def test_an_idle_host_of_a_mesh_is_a_warning(check):
    files = {
        "mgd.yaml": """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [
  {name: lbox, type: Mesh, topology: [1, 8]},
]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 24], host_topology: [1, 3]},
]
RelaxedGraph: []
""",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, mesh_host_rank: 0}
  - {rank: 1, mesh_id: 0, mesh_host_rank: 1}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
warning[T022]: no rank drives host 2 of mesh 0
 --> mgd.yaml:6:8
  |
6 |   {id: 0, board: lbox, device_topology: [1, 24], host_topology: [1, 3]},
  |        ^ a mesh of 3 hosts
 --> rank_bindings.yaml:1:1
  |
1 | rank_bindings:
  | ------------- these bind 2 ranks
"""
    check(files, expected)


def test_devices_seen_by_two_ranks_of_a_host_are_marked(check):
    files = {
        "hosts.txt": "a slots=2\n",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: "0,1"}}
  - {rank: 1, mesh_id: 1, env_overrides: {TT_VISIBLE_DEVICES: "1,2"}}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
error[T023]: ranks 0 and 1 both see device 1 of host `a`
 --> rank_bindings.yaml:3:63
  |
3 |   - {rank: 1, mesh_id: 1, env_overrides: {TT_VISIBLE_DEVICES: "1,2"}}
  |                                                               ^^^^^ rank 1
 --> rank_bindings.yaml:2:63
  |
2 |   - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: "0,1"}}
  |                                                               ----- rank 0
"""
    check(files, expected)


def test_devices_for_all_ranks_of_a_host_are_marked(check):
    files = {
        "hosts.txt": "a slots=2\n",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
global_env: {TT_VISIBLE_DEVICES: "0,1"}
""",
    }
    expected = """\
error[T023]: ranks 0 and 1 both see device 0 of host `a`
 --> rank_bindings.yaml:5:34
  |
5 | global_env: {TT_VISIBLE_DEVICES: "0,1"}
  |                                  ^^^^^ rank 1

hint: give each rank its `TT_VISIBLE_DEVICES` in `env_overrides`
"""
    check(files, expected)


def test_more_devices_than_the_mesh_has_are_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: "0,1,2,3,4,5,6,7,8"}}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T024]: rank 0 sees 9 devices, but its part of mesh 0 has 8
 --> rank_bindings.yaml:2:63
  |
2 |   - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: "0,1,2,3,4,5,6,7,8"}}
  |                                                               ^^^^^^^^^^^^^^^^^^^ 9 devices
 --> mgd.yaml:6:8
  |
6 |   {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  |        - 1 × 8 devices on 1 host
"""
    check(files, expected)


def test_a_list_of_devices_that_is_none_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: "0;1"}}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T024]: `TT_VISIBLE_DEVICES` of rank 0 is `0;1`; device numbers with commas were expected
 --> rank_bindings.yaml:2:63
  |
2 |   - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: "0;1"}}
  |                                                               ^^^^^ expected a text such as "0,1,2,3"
"""
    check(files, expected)


def test_a_device_listed_twice_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: "0,0"}}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T024]: `TT_VISIBLE_DEVICES` of rank 0 lists device 0 twice
 --> rank_bindings.yaml:2:63
  |
2 |   - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: "0,0"}}
  |                                                               ^^^^^
"""
    check(files, expected)


def test_values_of_variables_are_text(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: 0}}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T005]: `TT_VISIBLE_DEVICES` is `0`; text was expected
 --> rank_bindings.yaml:2:63
  |
2 |   - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: 0}}
  |                                                               ^ expected text

hint: put it in quotes: "0"
"""
    check(files, expected)


def test_an_undefined_variable_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
global_env: {TT_METAL_HOME: "${HOM}/tt"}
"""
    }
    expected = """\
error[T025]: `TT_METAL_HOME` uses `$HOM`, which is not defined on this machine
 --> rank_bindings.yaml:5:29
  |
5 | global_env: {TT_METAL_HOME: "${HOM}/tt"}
  |                             ^^^^^^^^^^^ not defined

hint: did you mean `$HOME`?
"""
    check(files, expected, environment={"HOME": "/home/me"})


def test_an_undefined_variable_without_a_likely_one_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
global_env: {DATA: "$NOWHERE"}
"""
    }
    expected = """\
error[T025]: `DATA` uses `$NOWHERE`, which is not defined on this machine
 --> rank_bindings.yaml:5:20
  |
5 | global_env: {DATA: "$NOWHERE"}
  |                    ^^^^^^^^^^ not defined

hint: `export NOWHERE=…` before starting, or write the value; `$$` stands for a dollar sign
"""
    check(files, expected)


def test_a_variable_with_a_zero_byte_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
global_env: {A: "x\\0y"}
"""
    }
    expected = """\
error[T005]: `A` holds a zero byte, which no variable can
 --> rank_bindings.yaml:5:17
  |
5 | global_env: {A: "x\\0y"}
  |                 ^^^^^^
"""
    check(files, expected)


def test_a_path_that_is_too_long_is_no_file(check):
    files = {
        ".git/HEAD": "x",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
""",
    }
    expected = """\
error[T001]: `mesh_graph_desc_path` names `xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…`, which does not exist
 --> rank_bindings.yaml:4:23
  |
4 | mesh_graph_desc_path: "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…
  |                       ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ no such file
  = note: looked in the current folder

hint: did you mean `mgd.yaml`, which lies beside rank_bindings.yaml?
"""
    check(files, expected)


def test_an_odd_name_of_a_variable_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
global_env: {"A B": "1"}
"""
    }
    expected = """\
error[T039]: `A B` cannot be the name of an environment variable
 --> rank_bindings.yaml:5:14
  |
5 | global_env: {"A B": "1"}
  |              ^^^^^ expected letters, digits and `_`, not beginning with a digit
"""
    check(files, expected)


def test_a_quoted_number_is_no_number(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: "0", mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T005]: `rank` is "0"; a whole number was expected
 --> rank_bindings.yaml:2:12
  |
2 |   - {rank: "0", mesh_id: 0}
  |            ^^^ expected a whole number

hint: remove the quotes
"""
    check(files, expected)


def test_a_fraction_is_no_rank(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0.0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T005]: `rank` is `0.0`; a whole number was expected
 --> rank_bindings.yaml:2:12
  |
2 |   - {rank: 0.0, mesh_id: 0}
  |            ^^^ expected a whole number
"""
    check(files, expected)


def test_true_is_no_rank(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: true, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T005]: `rank` is `true`; a whole number was expected
 --> rank_bindings.yaml:2:12
  |
2 |   - {rank: true, mesh_id: 0}
  |            ^^^^ expected a whole number
"""
    check(files, expected)


def test_a_negative_rank_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: -1, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T005]: `rank` is `-1`; a number of at least 0 was expected
 --> rank_bindings.yaml:2:12
  |
2 |   - {rank: -1, mesh_id: 0}
  |            ^^ expected a number of at least 0
"""
    check(files, expected)


def test_a_key_without_a_value_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: }
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T005]: `mesh_id` has no value; a whole number was expected
 --> rank_bindings.yaml:2:24
  |
2 |   - {rank: 0, mesh_id: }
  |                        ^ expected a whole number
"""
    check(files, expected)


def test_a_missing_key_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T006]: `mesh_id` is missing in a rank binding
 --> rank_bindings.yaml:2:5
  |
2 |   - {rank: 0}
  |     ^^^^^^^^^ has no `mesh_id`
"""
    check(files, expected)


def test_no_rows_are_not_enough(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings: []
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T005]: `rank_bindings` is an empty list; at least 1 item was expected
 --> rank_bindings.yaml:1:1
  |
1 | rank_bindings: []
  | ^^^^^^^^^^^^^ expected at least 1 item
"""
    check(files, expected)


def test_a_row_that_is_no_group_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - 0
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T005]: item 1 of `rank_bindings` is `0`; keys and values were expected
 --> rank_bindings.yaml:2:5
  |
2 |   - 0
  |     ^ expected keys and values
"""
    check(files, expected)


def test_rows_under_keys_are_no_list(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings: {0: 0, 1: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T005]: `rank_bindings` is a group of keys; a list was expected
 --> rank_bindings.yaml:1:1
  |
1 | rank_bindings: {0: 0, 1: 1}
  | ^^^^^^^^^^^^^ expected a list
"""
    check(files, expected)


def test_a_list_is_no_bindings_file(check):
    files = {
        "rank_bindings.yaml": """\
- {rank: 0, mesh_id: 0}
- {rank: 1, mesh_id: 1}
"""
    }
    expected = """\
error[T005]: the file is a list of 2 items; keys and values were expected
 --> rank_bindings.yaml:1:1
  |
1 | - {rank: 0, mesh_id: 0}
  | ^^^^^^^^^^^^^^^^^^^^^^^ expected keys and values
"""
    check(files, expected)


def test_an_empty_file_is_refused(check):
    files = {"rank_bindings.yaml": ""}
    expected = """\
error[T002]: rank_bindings.yaml is empty; a rank bindings file was expected
"""
    check(files, expected)


def test_a_file_of_comments_is_refused(check):
    files = {"rank_bindings.yaml": "# later\n"}
    expected = """\
error[T002]: rank_bindings.yaml holds nothing but comments
"""
    check(files, expected)


def test_an_unclosed_bracket_is_marked_where_it_opens(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings: [
  {rank: 0, mesh_id: 0},
  {rank: 1, mesh_id: 1}
mesh_graph_desc_path: mgd.yaml
"""
    }
    expected = """\
error[T008]: rank_bindings.yaml is not YAML: `[` is not closed, or a comma is missing after an item
 --> rank_bindings.yaml:1:16
  |
1 | rank_bindings: [
  |                ^ opened here
 --> rank_bindings.yaml:4:1
  |
4 | mesh_graph_desc_path: mgd.yaml
  | - the parser stopped here
"""
    check(files, expected)


def test_a_tab_is_marked(check):
    files = {"rank_bindings.yaml": "rank_bindings:\n\t- {rank: 0, mesh_id: 0}\n"}
    expected = """\
error[T008]: rank_bindings.yaml is not YAML: a tab indents line 2
 --> rank_bindings.yaml:2:1
  |
2 |     - {rank: 0, mesh_id: 0}
  | ^^^^ a tab; YAML indents with spaces
"""
    check(files, expected)


def test_a_key_given_twice_points_at_both_places(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T007]: key `rank` is given twice
 --> rank_bindings.yaml:3:15
  |
3 |   - {rank: 1, rank: 1, mesh_id: 1}
  |               ^^^^ and again here
 --> rank_bindings.yaml:3:6
  |
3 |   - {rank: 1, rank: 1, mesh_id: 1}
  |      ---- first given here
"""
    check(files, expected)


def test_a_descriptor_must_be_named(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
"""
    }
    expected = """\
error[T006]: `mesh_graph_desc_path` is missing in a rank bindings file
 --> rank_bindings.yaml:1:1
  |
1 | rank_bindings:
  | ^^^^^^^^^^^^^^ has no `mesh_graph_desc_path`

hint: write `mesh_graph_desc_path: "mgd.yaml"`
"""
    check(files, expected)


def test_a_descriptor_that_is_missing_too_is_named(check):
    files = {
        "mgd.yaml": None,
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
""",
    }
    expected = """\
error[T006]: `mesh_graph_desc_path` is missing in a rank bindings file
 --> rank_bindings.yaml:1:1
  |
1 | rank_bindings:
  | ^^^^^^^^^^^^^^ has no `mesh_graph_desc_path`
  = note: there is no mgd.yaml beside it

hint: describe the meshes in mgd.yaml, and write `mesh_graph_desc_path: "mgd.yaml"`
"""
    check(files, expected)


def test_a_missing_descriptor_says_where_it_was_looked_for(check):
    files = {
        ".git/HEAD": "x",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "other/mgd.yaml"
""",
    }
    expected = """\
error[T001]: `mesh_graph_desc_path` names `other/mgd.yaml`, which does not exist
 --> rank_bindings.yaml:4:23
  |
4 | mesh_graph_desc_path: "other/mgd.yaml"
  |                       ^^^^^^^^^^^^^^^^ no such file
  = note: looked in the current folder

hint: did you mean `mgd.yaml`, which lies beside rank_bindings.yaml?
"""
    check(files, expected)


def test_an_absolute_path_of_somebody_else_is_marked(check):
    files = {
        "mgd.yaml": None,
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "/home/nobody/git/mgd.yaml"
""",
    }
    expected = """\
error[T001]: `mesh_graph_desc_path` names `/home/nobody/git/mgd.yaml`, which does not exist
 --> rank_bindings.yaml:4:23
  |
4 | mesh_graph_desc_path: "/home/nobody/git/mgd.yaml"
  |                       ^^^^^^^^^^^^^^^^^^^^^^^^^^^ no such file
"""
    check(files, expected)


def test_a_value_with_a_line_end_stays_on_one_line(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: "0\\n\\e[31m", mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
"""
    }
    expected = """\
error[T005]: `rank` is "0\\n\\x1b[31m"; a whole number was expected
 --> rank_bindings.yaml:2:12
  |
2 |   - {rank: "0\\n\\e[31m", mesh_id: 0}
  |            ^^^^^^^^^^^ expected a whole number
"""
    check(files, expected)


def test_two_dollar_signs_stand_for_one(load, good):
    text = good["rank_bindings.yaml"] + 'global_env: {PRICE: "5$$", OTHER: "a$$b$HOME", BARE: "$1 $"}\n'
    loaded = load({"rank_bindings.yaml": text}, environment={"HOME": "/home/ann"})
    assert {"PRICE": "5$", "OTHER": "a$b/home/ann", "BARE": "$1 $"} == dict(loaded.topology.global_environment)
