"""Sub-contexts: what they mean, alone and merged from several files, and what is said about mistakes in them."""

import pytest

from ttlaunch.planning.environment import plan_environment, plan_rank_environment

ONE_MESH = """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [{name: lbox, type: Mesh, topology: [1, 8]}]
Mesh: [{id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]}]
RelaxedGraph: []
"""
MAPPING = "subcontext_id_to_rank_bindings:\n  0: a.yaml\n  1: sub/b.yaml\n"
A = """\
rank_bindings:
  - {rank: 0, mesh_id: 1}
  - {rank: 1, mesh_id: 0}
mesh_graph_desc_path: "mgd.yaml"
global_env: {SHARED: "1", A: "a"}
"""
B = """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
mesh_graph_desc_path: "one.yaml"
global_env: {SHARED: "1"}
"""
ONE = 'rank_bindings:\n  - {rank: 0, mesh_id: 0}\nmesh_graph_desc_path: "one.yaml"\n'
HOSTS = "h0\nh1\nh2\n"


@pytest.fixture
def merged():
    """Two files, the second with a descriptor beside it."""
    return {
        "hosts.txt": HOSTS,
        "rank_bindings.yaml": MAPPING,
        "a.yaml": A,
        "sub/b.yaml": B,
        "sub/one.yaml": ONE_MESH,
    }


def environments(topology, folder):
    shared = plan_environment(topology, shell={}, working_folder=folder)
    return [shared | plan_rank_environment(b.rank, b, topology) for b in topology.bindings]


def test_the_ranks_of_a_file_come_after_those_before_it(load, merged):
    topology = load(merged).topology
    assert [(b.rank, b.subcontext_id) for b in topology.bindings] == [(0, 0), (1, 0), (2, 1)]
    assert topology.subcontext_sizes == (2, 1)


def test_meshes_of_several_descriptors_have_ids_of_their_own(load, merged):
    topology = load(merged).topology
    assert [mesh.id for mesh in topology.meshes] == [0, 1, 2]
    assert [(b.mesh_id, b.local_mesh_id) for b in topology.bindings] == [(1, 1), (0, 0), (2, 0)]
    assert topology.driven(topology.bindings[2]).span.source.name == "sub/one.yaml"


def test_each_rank_learns_its_sub_context_and_its_own_descriptor(load, merged, tmp_path):
    found = environments(load(merged).topology, tmp_path)
    names = ("TT_MESH_ID", "TT_RUN_SUBCONTEXT_ID", "TT_RUN_SUBCONTEXT_SIZES", "TT_MESH_GRAPH_DESC_PATH")
    assert [tuple(environment[name] for name in names) for environment in found] == [
        ("1", "0", "2,1", str(tmp_path / "mgd.yaml")),
        ("0", "0", "2,1", str(tmp_path / "mgd.yaml")),
        ("0", "1", "2,1", str(tmp_path / "sub/one.yaml")),
    ]
    assert [environment["A"] for environment in found] == ["a"] * 3


def test_all_files_are_listed_as_read(load, merged):
    assert [file.name for file in load(merged).files] == [
        "hosts.txt",
        "rank_bindings.yaml",
        "a.yaml",
        "mgd.yaml",
        "b.yaml",
        "one.yaml",
    ]


def test_rows_of_one_file_may_name_their_own_descriptor(load):
    rows = """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_id: 0, subcontext_size: 1}
  - {rank: 1, mesh_id: 0, subcontext_id: 1, subcontext_size: 1, mesh_graph_desc_path: other.yaml}
mesh_graph_desc_path: one.yaml
"""
    topology = load({"rank_bindings.yaml": rows, "one.yaml": ONE_MESH, "other.yaml": ONE_MESH}).topology
    assert [b.mesh_graph_path.name for b in topology.bindings] == ["one.yaml", "other.yaml"]
    assert [b.mesh_id for b in topology.bindings] == [0, 1]


def test_a_file_may_name_the_descriptor_of_each_sub_context(load):
    rows = """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_id: 1}
  - {rank: 1, mesh_id: 0, subcontext_id: 0}
subcontext_id_to_mesh_graph_descriptor: {0: one.yaml, 1: other.yaml}
"""
    topology = load({"rank_bindings.yaml": rows, "one.yaml": ONE_MESH, "other.yaml": ONE_MESH}).topology
    assert [b.mesh_graph_path.name for b in topology.bindings] == ["other.yaml", "one.yaml"]


def test_sub_contexts_that_drive_different_meshes_share_a_descriptor(load, good):
    rows = good["rank_bindings.yaml"].replace("mesh_id: 1", "mesh_id: 1, subcontext_id: 0")
    topology = load({"rank_bindings.yaml": rows.replace("mesh_id: 0", "mesh_id: 0, subcontext_id: 1")}).topology
    assert [mesh.id for mesh in topology.meshes] == [0, 1]
    assert [(b.mesh_id, b.mesh_graph_path) for b in topology.bindings] == [(1, None), (0, None)]


def test_sub_contexts_that_drive_the_same_mesh_have_a_copy_each(load):
    mapping = "subcontext_id_to_rank_bindings: {0: a.yaml, 1: b.yaml}\n"
    files = {"rank_bindings.yaml": mapping, "a.yaml": ONE, "b.yaml": ONE, "one.yaml": ONE_MESH}
    topology = load(files).topology
    assert [mesh.id for mesh in topology.meshes] == [0, 1]
    assert [(b.mesh_id, b.local_mesh_id) for b in topology.bindings] == [(0, 0), (1, 0)]


def test_links_and_meshes_of_the_second_descriptor_move_together(load, good):
    mapping = "subcontext_id_to_rank_bindings: {0: a.yaml, 1: a.yaml}\n"
    hosts = "".join(f"h{number}\n" for number in range(4))
    files = {"hosts.txt": hosts, "rank_bindings.yaml": mapping, "a.yaml": good["rank_bindings.yaml"]}
    topology = load(files).topology
    assert [(link.a, link.b) for link in topology.links] == [(0, 1), (2, 3)]
    assert [b.mesh_id for b in topology.bindings] == [1, 0, 3, 2]


def test_sub_contexts_of_rows_count_from_zero(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_id: 0}
  - {rank: 1, mesh_id: 1, subcontext_id: 2}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
error[T057]: sub-contexts have a gap: there is a sub-context 2 but no sub-context 1
 --> rank_bindings.yaml:3:42
  |
3 |   - {rank: 1, mesh_id: 1, subcontext_id: 2}
  |                                          ^ expected 1
"""
    check(files, expected)


def test_a_mapping_counts_from_zero(check):
    files = {
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {1: a.yaml, 2: a.yaml}\n",
        "a.yaml": ONE,
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T057]: sub-context 1 stands where sub-context 0 was expected
 --> rank_bindings.yaml:1:34
  |
1 | subcontext_id_to_rank_bindings: {1: a.yaml, 2: a.yaml}
  |                                  ^ expected 0

hint: sub-contexts count from 0, in order
"""
    check(files, expected)


def test_a_mapping_stands_in_order(check):
    files = {
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {1: a.yaml, 0: a.yaml}\n",
        "a.yaml": ONE,
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T057]: sub-context 1 stands where sub-context 0 was expected
 --> rank_bindings.yaml:1:34
  |
1 | subcontext_id_to_rank_bindings: {1: a.yaml, 0: a.yaml}
  |                                  ^ expected 0

hint: sub-contexts count from 0, in order
"""
    check(files, expected)


def test_a_quoted_number_is_no_sub_context(check):
    files = {
        "rank_bindings.yaml": 'subcontext_id_to_rank_bindings: {"0": a.yaml}\n',
        "a.yaml": ONE,
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T005]: key `0` in `subcontext_id_to_rank_bindings`: a whole number was expected as a key
 --> rank_bindings.yaml:1:34
  |
1 | subcontext_id_to_rank_bindings: {"0": a.yaml}
  |                                  ^^^ expected a whole number
"""
    check(files, expected)


def test_an_empty_mapping_is_marked(check):
    files = {
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {}\n",
    }
    expected = """\
error[T005]: `subcontext_id_to_rank_bindings` is a group of keys; at least 1 item was expected
 --> rank_bindings.yaml:1:1
  |
1 | subcontext_id_to_rank_bindings: {}
  | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ expected at least 1 item
"""
    check(files, expected)


def test_a_mapping_has_no_rows_of_its_own(check):
    files = {
        "rank_bindings.yaml": """\
subcontext_id_to_rank_bindings: {0: a.yaml}
rank_bindings: []
""",
        "a.yaml": ONE,
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T004]: unknown key `rank_bindings` in a mapping of sub-contexts
 --> rank_bindings.yaml:2:1
  |
2 | rank_bindings: []
  | ^^^^^^^^^^^^^ expected `subcontext_id_to_rank_bindings`

warning[T055]: no rank runs on host `loudbox-02`
 --> hosts.txt:2:1
  |
2 | loudbox-02 slots=1
  | ^^^^^^^^^^ 1 slot before it
 --> rank_bindings.yaml:1:1
  |
1 | subcontext_id_to_rank_bindings: {0: a.yaml}
  | ------------------------------ these bind 1 rank
"""
    check(files, expected)


def test_a_size_that_disagrees_with_the_rows_is_counted(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_id: 0, subcontext_size: 2}
  - {rank: 1, mesh_id: 1, subcontext_id: 1}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
error[T058]: `subcontext_size` of sub-context 0 is 2, but 1 rank belongs to it
 --> rank_bindings.yaml:2:62
  |
2 |   - {rank: 0, mesh_id: 0, subcontext_id: 0, subcontext_size: 2}
  |                                                              ^ expected 1
"""
    check(files, expected)


def test_a_size_is_checked_in_merged_files(check):
    files = {
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {0: a.yaml, 1: b.yaml}\n",
        "a.yaml": ONE,
        "b.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_size: 3}
mesh_graph_desc_path: "one.yaml"
""",
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T058]: `subcontext_size` of sub-context 1 is 3, but 1 rank belongs to it
 --> b.yaml:2:44
  |
2 |   - {rank: 0, mesh_id: 0, subcontext_size: 3}
  |                                            ^ expected 1
"""
    check(files, expected)


def test_a_rank_without_a_sub_context_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1, subcontext_id: 0}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
error[T059]: rank 0 belongs to no sub-context, but rank 1 does
 --> rank_bindings.yaml:2:12
  |
2 |   - {rank: 0, mesh_id: 0}
  |            ^ has no `subcontext_id`
 --> rank_bindings.yaml:3:42
  |
3 |   - {rank: 1, mesh_id: 1, subcontext_id: 0}
  |                                          - sub-context 0
"""
    check(files, expected)


def test_a_size_needs_a_sub_context(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_size: 2}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
error[T059]: rank 0 has a `subcontext_size` but no `subcontext_id`
 --> rank_bindings.yaml:2:12
  |
2 |   - {rank: 0, mesh_id: 0, subcontext_size: 2}
  |            ^ has no `subcontext_id`
"""
    check(files, expected)


def test_two_values_of_a_variable_point_at_both_files(check):
    files = {
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {0: a.yaml, 1: b.yaml}\n",
        "a.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
mesh_graph_desc_path: "one.yaml"
global_env: {A: one}
""",
        "b.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
mesh_graph_desc_path: "one.yaml"
global_env: {A: two}
""",
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T060]: sub-contexts 0 and 1 set `A` of every rank to different values
 --> b.yaml:4:17
  |
4 | global_env: {A: two}
  |                 ^^^ sub-context 1
 --> a.yaml:4:17
  |
4 | global_env: {A: one}
  |                 --- sub-context 0

hint: set it in `env_overrides` of the ranks that differ
"""
    check(files, expected)


def test_a_file_that_does_not_exist_is_marked(check):
    files = {
        ".git/HEAD": "x",
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {0: a.yaml, 1: b.yaml}\n",
        "a.yaml": ONE,
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T001]: `subcontext_id_to_rank_bindings` names `b.yaml`, which does not exist
 --> rank_bindings.yaml:1:48
  |
1 | subcontext_id_to_rank_bindings: {0: a.yaml, 1: b.yaml}
  |                                                ^^^^^^ no such file
  = note: looked in the current folder
"""
    check(files, expected)


def test_a_mapping_inside_a_mapping_is_refused(check):
    files = {
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {0: a.yaml, 1: b.yaml}\n",
        "a.yaml": ONE,
        "b.yaml": "subcontext_id_to_rank_bindings: {0: a.yaml}\n",
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T061]: the file of sub-context 1 is itself a mapping of sub-contexts
 --> b.yaml:1:1
  |
1 | subcontext_id_to_rank_bindings: {0: a.yaml}
  | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ expected `rank_bindings`
 --> rank_bindings.yaml:1:48
  |
1 | subcontext_id_to_rank_bindings: {0: a.yaml, 1: b.yaml}
  |                                                ------ named here for sub-context 1

hint: name its files in the outer mapping
"""
    check(files, expected)


def test_a_mapping_that_names_itself_is_refused(check):
    files = {
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {0: rank_bindings.yaml}\n",
    }
    expected = """\
error[T061]: the file of sub-context 0 is itself a mapping of sub-contexts
 --> rank_bindings.yaml:1:1
  |
1 | subcontext_id_to_rank_bindings: {0: rank_bindings.yaml}
  | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ expected `rank_bindings`
 --> rank_bindings.yaml:1:37
  |
1 | subcontext_id_to_rank_bindings: {0: rank_bindings.yaml}
  |                                     ------------------ named here for sub-context 0

hint: name its files in the outer mapping
"""
    check(files, expected)


def test_a_row_of_another_sub_context_is_marked(check):
    files = {
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {0: a.yaml}\n",
        "a.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_id: 4}
mesh_graph_desc_path: "one.yaml"
""",
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T061]: rank 0 in the file of sub-context 0 belongs to sub-context 4
 --> a.yaml:2:42
  |
2 |   - {rank: 0, mesh_id: 0, subcontext_id: 4}
  |                                          ^ expected 0, or nothing

warning[T055]: no rank runs on host `loudbox-02`
 --> hosts.txt:2:1
  |
2 | loudbox-02 slots=1
  | ^^^^^^^^^^ 1 slot before it
 --> rank_bindings.yaml:1:1
  |
1 | subcontext_id_to_rank_bindings: {0: a.yaml}
  | ------------------------------ these bind 1 rank
"""
    check(files, expected)


def test_a_mistake_in_a_merged_file_points_at_it(check):
    files = {
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {0: a.yaml, 1: b.yaml}\n",
        "a.yaml": ONE,
        "b.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 7}
mesh_graph_desc_path: "one.yaml"
""",
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T011]: rank 1 is bound to mesh 7, which does not exist
 --> b.yaml:2:24
  |
2 |   - {rank: 0, mesh_id: 7}
  |                        ^ no mesh has id 7
 --> one.yaml:3:1
  |
3 | Mesh: [{id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]}]
  | ---- this graph defines mesh 0
"""
    check(files, expected)


def test_a_sub_context_without_a_descriptor_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_id: 0}
  - {rank: 1, mesh_id: 1, subcontext_id: 1}
subcontext_id_to_mesh_graph_descriptor: {0: mgd.yaml}
""",
    }
    expected = """\
error[T057]: sub-context 1 has no descriptor
 --> rank_bindings.yaml:3:42
  |
3 |   - {rank: 1, mesh_id: 1, subcontext_id: 1}
  |                                          ^ not in `subcontext_id_to_mesh_graph_descriptor`
"""
    check(files, expected)


def test_a_descriptor_without_ranks_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_id: 0}
  - {rank: 1, mesh_id: 1, subcontext_id: 0}
subcontext_id_to_mesh_graph_descriptor: {0: mgd.yaml, 1: mgd.yaml}
""",
    }
    expected = """\
error[T057]: sub-context 1 has a descriptor but no rank
 --> rank_bindings.yaml:4:58
  |
4 | subcontext_id_to_mesh_graph_descriptor: {0: mgd.yaml, 1: mgd.yaml}
  |                                                          ^^^^^^^^ drives nothing
"""
    check(files, expected)


def test_descriptors_of_sub_contexts_count_from_zero(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_id: 0}
  - {rank: 1, mesh_id: 1, subcontext_id: 1}
subcontext_id_to_mesh_graph_descriptor: {1: mgd.yaml, 0: mgd.yaml}
""",
    }
    expected = """\
error[T057]: sub-context 1 stands where sub-context 0 was expected
 --> rank_bindings.yaml:4:42
  |
4 | subcontext_id_to_mesh_graph_descriptor: {1: mgd.yaml, 0: mgd.yaml}
  |                                          ^ expected 0

hint: sub-contexts count from 0, in order
"""
    check(files, expected)


def test_a_descriptor_of_a_sub_context_that_does_not_exist_is_marked(check):
    files = {
        ".git/HEAD": "x",
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_id: 0}
  - {rank: 1, mesh_id: 1, subcontext_id: 1}
subcontext_id_to_mesh_graph_descriptor: {0: mgd.yaml, 1: x/mgd.yaml}
""",
    }
    expected = """\
error[T001]: `subcontext_id_to_mesh_graph_descriptor` names `x/mgd.yaml`, which does not exist
 --> rank_bindings.yaml:4:58
  |
4 | subcontext_id_to_mesh_graph_descriptor: {0: mgd.yaml, 1: x/mgd.yaml}
  |                                                          ^^^^^^^^^^ no such file
  = note: looked in the current folder

hint: did you mean `mgd.yaml`, which lies beside rank_bindings.yaml?
"""
    check(files, expected)


def test_more_ranks_of_all_files_than_slots_are_counted(check):
    files = {
        "hosts.txt": "a slots=1\n",
        "rank_bindings.yaml": "subcontext_id_to_rank_bindings: {0: a.yaml, 1: a.yaml}\n",
        "a.yaml": ONE,
        "one.yaml": ONE_MESH,
    }
    expected = """\
error[T019]: 2 ranks are bound but the hosts offer 1 slot
 --> a.yaml:2:12
  |
2 |   - {rank: 0, mesh_id: 0}
  |            ^ rank 1 has no slot
 --> hosts.txt:1:3
  |
1 | a slots=1
  |   ------- 1 slot on 1 host
"""
    check(files, expected)


def test_a_negative_sub_context_is_marked(check):
    files = {
        "rank_bindings.yaml": """\
rank_bindings:
  - {rank: 0, mesh_id: 0, subcontext_id: -1}
  - {rank: 1, mesh_id: 1, subcontext_id: 0}
mesh_graph_desc_path: "mgd.yaml"
""",
    }
    expected = """\
error[T005]: `subcontext_id` is `-1`; a number of at least 0 was expected
 --> rank_bindings.yaml:2:42
  |
2 |   - {rank: 0, mesh_id: 0, subcontext_id: -1}
  |                                          ^^ expected a number of at least 0
"""
    check(files, expected)
