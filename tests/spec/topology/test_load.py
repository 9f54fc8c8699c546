"""What is said about files that are missing, and about `cluster.yaml`."""

import pytest

from ttlaunch.spec.topology.variables import misspelled


def test_a_missing_hostfile_is_named(check):
    files = {"hosts.txt": None}
    expected = """\
error[T001]: hosts.txt does not exist; a hostfile was expected

hint: list the hosts in it, one a line: `HOST slots=1`
"""
    check(files, expected)


def test_a_misspelled_hostfile_is_recognised(check):
    files = {"hosts.txt": None, "host.txt": "a slots=1\n"}
    expected = """\
error[T001]: hosts.txt does not exist; a hostfile was expected

hint: did you mean `host.txt`?
"""
    check(files, expected)


def test_a_hostfile_that_is_a_folder_is_refused(check):
    files = {"hosts.txt": None, "hosts.txt/x": ""}
    expected = """\
error[T001]: hosts.txt is a folder; a hostfile was expected
"""
    check(files, expected)


def test_bindings_without_a_descriptor_are_refused(check):
    files = {".git/HEAD": "x", "mgd.yaml": None}
    expected = """\
error[T001]: `mesh_graph_desc_path` names `mgd.yaml`, which does not exist
 --> rank_bindings.yaml:4:23
  |
4 | mesh_graph_desc_path: "mgd.yaml"
  |                       ^^^^^^^^^^ no such file
  = note: looked in the current folder
"""
    check(files, expected)


def test_a_descriptor_without_bindings_is_refused(check):
    files = {"rank_bindings.yaml": None}
    expected = """\
error[T001]: rank_bindings.yaml does not exist, so mgd.yaml has meshes that no rank drives

hint: list in it which rank drives which mesh
"""
    check(files, expected)


def test_a_descriptor_of_version_2_without_bindings_is_refused(check):
    files = {"rank_bindings.yaml": None, "mgd.yaml": None, "mgd.textproto": "mesh_descriptors {\n"}
    expected = """\
error[T001]: rank_bindings.yaml does not exist, so mgd.textproto has meshes that no rank drives

hint: list in it which rank drives which mesh

error[T008]: mgd.textproto is not text format: a group that line 1 opens is never closed
 --> mgd.textproto:1:18
  |
1 | mesh_descriptors {
  |                  ^ needs `}`
"""
    check(files, expected)


def test_mistakes_of_all_files_are_found_at_once(check):
    files = {
        "hosts.txt": "loudbox-01 slots=1 foo=3\n",
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
""",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_idd: 0}
  - {rank: 1, mesh_id: 2}
mesh_graph_desc_path: "mgd.yaml"
""",
        "cluster.yaml": "prot: 22\n",
    }
    expected = """\
error[T012]: unknown word `foo=3` after host `loudbox-01`
 --> hosts.txt:1:20
  |
1 | loudbox-01 slots=1 foo=3
  |                    ^^^^^ expected `slots=` or `max_slots=`

hint: write one host a line; a comment begins with `#`

error[T004]: unknown key `mesh_idd` in a rank binding
 --> rank_bindings.yaml:2:15
  |
2 |   - {rank: 0, mesh_idd: 0}
  |               ^^^^^^^^ expected `mesh_id`, `mesh_host_rank`, `env_overrides`, `subcontext_id`, `subcontext_size` or `mesh_graph_desc_path`

hint: did you mean `mesh_id`?

error[T032]: a link connects mesh 0 to itself
  --> mgd.yaml:10:8
   |
10 |   [M0, M0, 2],
   |        ^^ expected another mesh

error[T004]: unknown key `prot` in a cluster file
 --> cluster.yaml:1:1
  |
1 | prot: 22
  | ^^^^ expected `user`, `port`, `identity_file`, `remote_folder`, `python`, `mpi_prefix`, `network` or `environment`

hint: did you mean `port`?

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


def test_an_unknown_setting_is_marked(check):
    files = {"cluster.yaml": "username: joe\n"}
    expected = """\
error[T004]: unknown key `username` in a cluster file
 --> cluster.yaml:1:1
  |
1 | username: joe
  | ^^^^^^^^ expected `user`, `port`, `identity_file`, `remote_folder`, `python`, `mpi_prefix`, `network` or `environment`

hint: did you mean `user`?
"""
    check(files, expected)


def test_a_port_out_of_range_is_marked(check):
    files = {"cluster.yaml": "port: 70000\n"}
    expected = """\
error[T005]: `port` is `70000`; a number of at most 65,535 was expected
 --> cluster.yaml:1:7
  |
1 | port: 70000
  |       ^^^^^ expected a number of at most 65,535
"""
    check(files, expected)


def test_a_setting_of_the_wrong_kind_is_marked(check):
    files = {"cluster.yaml": 'user: 5\nport: "22"\n'}
    expected = """\
error[T005]: `user` is `5`; text was expected
 --> cluster.yaml:1:7
  |
1 | user: 5
  |       ^ expected text

hint: put it in quotes: "5"

error[T005]: `port` is "22"; a whole number was expected
 --> cluster.yaml:2:7
  |
2 | port: "22"
  |       ^^^^ expected a whole number

hint: remove the quotes
"""
    check(files, expected)


def test_an_undefined_variable_in_the_cluster_file_is_marked(check):
    files = {"cluster.yaml": 'environment: {DATA: "$NOWHERE"}\n'}
    expected = """\
error[T025]: `DATA` uses `$NOWHERE`, which is not defined on this machine
 --> cluster.yaml:1:21
  |
1 | environment: {DATA: "$NOWHERE"}
  |                     ^^^^^^^^^^ not defined

hint: `export NOWHERE=…` before starting, or write the value; `$$` stands for a dollar sign
"""
    check(files, expected)


@pytest.mark.parametrize("user", ["-oProxyCommand=touch x", "a b", "joe;reboot", "joe@there"])
def test_what_no_login_name_can_be_is_refused_before_a_command_is_made_of_it(check, user):
    files = {"cluster.yaml": f'user: "{user}"\n'}
    expected = f"""\
error[T014]: `{user}` cannot be a login name
 --> cluster.yaml:1:7
  |
1 | user: "{user}"
  |       {"^" * (len(user) + 2)} a login name has letters, digits, `-`, `_` and `.`
"""
    check(files, expected)


def test_a_login_name_that_begins_with_a_dash_is_refused_in_a_hostfile_too(check):
    files = {"hosts.txt": "-oProxyCommand=x@loudbox-01\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T014]: `-oProxyCommand=x` cannot be a login name
 --> hosts.txt:1:1
  |
1 | -oProxyCommand=x@loudbox-01
  | ^^^^^^^^^^^^^^^^ a login name has letters, digits, `-`, `_` and `.`
"""
    check(files, expected)


@pytest.mark.parametrize(
    ("network", "problem"),
    [
        ("1.2.3.0/40", "no IPv4 network is written like this"),
        ("300.1.1.0/24", "no IPv4 network is written like this"),
        ("fe80::/10", "ranks talk over IPv4, and this is an IPv6 network"),
    ],
)
def test_a_network_that_is_none_is_refused_at_its_place(check, network, problem):
    files = {"cluster.yaml": f"network: {network}\n"}
    expected = f"""\
error[T005]: `network` is `{network}`: {problem}
 --> cluster.yaml:1:10
  |
1 | network: {network}
  |          {"^" * len(network)} expected a network such as `10.0.0.0/24`, or an interface
"""
    check(files, expected)


def test_a_merge_key_is_refused(check):
    files = {"cluster.yaml": "a: &a {x: 1}\n<<: *a\n"}
    expected = """\
error[T008]: cluster.yaml holds a merge key `<<`
 --> cluster.yaml:2:1
  |
2 | <<: *a
  | ^^

hint: write the merged keys out
"""
    check(files, expected)


def test_a_host_that_no_rank_reaches_is_a_warning(check):
    files = {"hosts.txt": "loudbox-01 slots=2\nloudbox-02 slots=1\nloudbox-03 slots=1\n"}
    check(
        files,
        """\
warning[T055]: no rank runs on hosts `loudbox-02` and `loudbox-03`
 --> hosts.txt:2:1
  |
2 | loudbox-02 slots=1
  | ^^^^^^^^^^ 2 slots before it
 --> rank_bindings.yaml:1:1
  |
1 | rank_bindings:
  | ------------- these bind 2 ranks
""",
    )


def test_a_variable_one_letter_from_a_known_one_is_a_warning(check, good):
    files = {"rank_bindings.yaml": good["rank_bindings.yaml"] + "global_env: {TT_METL_HOME: /opt, TT_MINE: x}\n"}
    check(
        files,
        """\
warning[T056]: nothing is known to read the variable `TT_METL_HOME`
 --> rank_bindings.yaml:5:14
  |
5 | global_env: {TT_METL_HOME: /opt, TT_MINE: x}
  |              ^^^^^^^^^^^^

hint: did you mean `TT_METAL_HOME`?
""",
    )


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("TT_VISIBLE_DEVICE", "TT_VISIBLE_DEVICES"),
        ("TT_VISIBLE_DEVICESS", "TT_VISIBLE_DEVICES"),
        ("TT_MESH_DI", "TT_MESH_ID"),
        ("tt_mesh_id", "TT_MESH_ID"),
        ("TT_MESH_ID", None),
        ("TT_MESH", None),
        ("MESH_DEVICE", None),
    ],
)
def test_one_slip_is_one_letter_or_two_swapped(name, known):
    assert known == misspelled(name)
