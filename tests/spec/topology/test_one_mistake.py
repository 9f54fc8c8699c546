"""One mistake in the files of a cluster is one diagnostic, wherever its consequences show."""

import pytest

from ttlaunch.diagnostics import Severity, Source
from ttlaunch.spec.topology.load import load_topology_files
from ttlaunch.spec.topology.recognise import Kind
from ttlaunch.spec.topology.single import check_file

TRAIN = "training_config:\n  seed: 1\ntransformer_config:\n  num_blocks: 2\n"
CLUSTER = "user: ann\nport: 22\n"
FIVE = """\
mesh_descriptors {
  name: "M0" arch: WORMHOLE_B0
  device_topology { dims: [1, 8] } host_topology { dims: [1, 1] } channels { count: 2 }
}
graph_descriptors {
  name: "G0" type: "FABRIC"
"""
for mesh in range(5):
    FIVE += f'  instances {{ mesh {{ mesh_descriptor: "M0" mesh_id: {mesh} }} }}\n'
for mesh in range(4):
    FIVE += "  connections {\n"
    for end in (mesh, mesh + 1):
        FIVE += f'    nodes {{ mesh {{ mesh_descriptor: "M0" mesh_id: {end} }} }}\n'
    FIVE += "    channels { count: 2 }\n  }\n"
FIVE += '}\ntop_level_instance { graph { graph_descriptor: "G0" graph_id: 0 } }\n'
FIVE_BOUND = (
    "rank_bindings:\n"
    + "".join(f"  - {{rank: {rank}, mesh_id: {rank}}}\n" for rank in range(5))
    + 'mesh_graph_desc_path: "mgd.textproto"\n'
)
FIVE_YAML = (
    "ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}\n"
    "Board: [{name: lbox, type: Mesh, topology: [1, 8]}]\nMesh: [\n"
    + "".join(f"  {{id: {mesh}, board: lbox, device_topology: [1, 8], host_topology: [1, 1]}},\n" for mesh in range(5))
    + "]\nRelaxedGraph: [[M0, M1, 2], [M1, M2, 2], [M2, M3, 2], [M3, M4, 2]]\n"
)


def configuration(good, kind):
    """The texts of a good configuration: of two ranks, of five with a descriptor of version 2, and of five with version 1."""
    hosts = "".join(f"h{number} slots=1\n" for number in range(5))
    five = {"hosts.txt": hosts, "rank_bindings.yaml": FIVE_BOUND}
    if kind == "version 2":
        return five | {"mgd.textproto": FIVE, "mgd.yaml": None}
    if kind == "version 1":
        return five | {"mgd.yaml": FIVE_YAML, "rank_bindings.yaml": FIVE_BOUND.replace("textproto", "yaml")}
    return dict(good)


def swap(*names):
    return lambda files: files | dict(zip(names, [files[name] for name in (*names[1:], names[0])], strict=True))


def put(name, text):
    return lambda files: files | {name: text}


def edit(name, old, new, count=-1):
    return lambda files: files | {name: files[name].replace(old, new, count)}


MISTAKES = {
    "hostfile and bindings swapped": ("", swap("hosts.txt", "rank_bindings.yaml"), "are swapped"),
    "bindings and descriptor swapped": ("", swap("rank_bindings.yaml", "mgd.yaml"), "are swapped"),
    "hostfile and descriptor swapped": ("", swap("hosts.txt", "mgd.yaml"), "are swapped"),
    "all three in turn": ("", swap("hosts.txt", "rank_bindings.yaml", "mgd.yaml"), "are swapped"),
    "bindings and descriptor of version 2 swapped": ("version 2", swap("rank_bindings.yaml", "mgd.textproto"), "are swapped"),
    "no hostfile": ("", put("hosts.txt", None), "hosts.txt does not exist"),
    "no bindings": ("", put("rank_bindings.yaml", None), "rank_bindings.yaml does not exist"),
    "no descriptor": ("", put("mgd.yaml", None), "names `mgd.yaml`, which does not exist"),
    "an empty hostfile": ("", put("hosts.txt", ""), "hosts.txt is empty"),
    "empty bindings": ("", put("rank_bindings.yaml", ""), "rank_bindings.yaml is empty"),
    "an empty descriptor": ("", put("mgd.yaml", ""), "mgd.yaml is empty"),
    "a folder as hostfile": ("", lambda f: f | {"hosts.txt": None, "hosts.txt/x": ""}, "hosts.txt is a folder"),
    "a folder as bindings": ("", lambda f: f | {"rank_bindings.yaml": None, "rank_bindings.yaml/x": ""}, "is a folder"),
    "a folder as descriptor": ("", lambda f: f | {"mgd.yaml": None, "mgd.yaml/x": ""}, "names `mgd.yaml`, which is a folder"),
    "a path to a folder": ("", edit("rank_bindings.yaml", '"mgd.yaml"', '"."'), "names `.`, which is a folder"),
    "a training file as hostfile": ("", put("hosts.txt", TRAIN), "hosts.txt is a training file; a hostfile was expected"),
    "a training file as bindings": ("", put("rank_bindings.yaml", TRAIN), "rank_bindings.yaml is a training file"),
    "a training file as descriptor": ("", put("mgd.yaml", TRAIN), "`mesh_graph_desc_path` names `mgd.yaml`, which is a training file"),
    "a training file as cluster file": ("", put("cluster.yaml", TRAIN), "cluster.yaml is a training file"),
    "a cluster file as bindings": ("", put("rank_bindings.yaml", CLUSTER), "rank_bindings.yaml is a cluster file"),
    "a path to the hostfile": ("", edit("rank_bindings.yaml", '"mgd.yaml"', '"hosts.txt"'), "names `hosts.txt`, which is a hostfile"),
    "a path to the bindings": ("", edit("rank_bindings.yaml", '"mgd.yaml"', '"rank_bindings.yaml"'), "names `rank_bindings.yaml`, which is a rank bindings file"),
    "a path of another user": ("", edit("rank_bindings.yaml", '"mgd.yaml"', '"/home/bob/mgd.yaml"'), "names `/home/bob/mgd.yaml`, which does not exist"),
    "a mapping of descriptors as bindings": ("", put("rank_bindings.yaml", "subcontext_id_to_mesh_graph_descriptor: {0: mgd.yaml}\n"), "rank_bindings.yaml is a mapping of files"),
    "a mapping of mock clusters as bindings": ("", put("rank_bindings.yaml", "rank_to_cluster_mock_cluster_desc: {0: a.yaml}\n"), "rank_bindings.yaml is a mapping of files"),
    "a host twice": ("", edit("hosts.txt", "loudbox-02", "loudbox-01"), "is listed again"),
    "a rank twice": ("", edit("rank_bindings.yaml", "rank: 1", "rank: 0"), "rank 0 is bound twice"),
    "a rank left out": ("version 1", edit("rank_bindings.yaml", "  - {rank: 2, mesh_id: 2}\n", ""), "ranks have a gap"),
    "a mesh id twice": ("", edit("mgd.yaml", "id: 1", "id: 0"), "mesh 0 is defined twice"),
    "a mesh id twice among five": ("version 1", edit("mgd.yaml", "id: 3", "id: 2"), "mesh 2 is defined twice"),
    "a mesh id twice in version 2": ("version 2", edit("mgd.textproto", "mesh_id: 3", "mesh_id: 2", 1), "mesh 2 is defined twice"),
    "a board twice": ("", edit("mgd.yaml", "Board: [\n", "Board: [\n  {name: lbox, type: Mesh, topology: [1, 8]},\n"), "board `lbox` is defined twice"),
    "a descriptor that does not exist": ("version 2", edit("mgd.textproto", 'name: "M0"', 'name: "M1"'), "names mesh descriptor `M0`, which does not exist"),
    "a graph that does not exist": ("version 2", edit("mgd.textproto", 'graph_descriptor: "G0"', 'graph_descriptor: "G1"'), "names graph descriptor `G1`"),
    "a board that does not exist": ("version 1", edit("mgd.yaml", "name: lbox", "name: lbx"), "a mesh is made of board `lbox`, which does not exist"),
    "a mesh that does not exist": ("", edit("rank_bindings.yaml", "mesh_id: 0", "mesh_id: 7"), "rank 1 is bound to mesh 7, which does not exist"),
    "a mesh left out": ("version 1", edit("mgd.yaml", "  {id: 4, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},\n", ""), "a link names mesh 4, which does not exist"),
    "a mesh left out in version 2": ("version 2", edit("mgd.textproto", '  instances { mesh { mesh_descriptor: "M0" mesh_id: 3 } }\n', ""), "a link names mesh 3, which does not exist"),
    "a key misspelled in every row": ("version 1", edit("rank_bindings.yaml", "mesh_id", "meshid"), "unknown key `meshid`"),
    "another architecture misspelled": ("", edit("mgd.yaml", "wormhole_b0", "wormhole"), "`arch` is `wormhole`"),
    "rows and columns mixed up": ("", edit("mgd.yaml", "topology: [1, 8]},\n]", "topology: [8, 1]},\n]"), "but its hosts make [8, 1]"),
    "too many channels": ("", edit("mgd.yaml", "M1, 2]", "M1, 99]"), "has 99 channels"),
    "too few slots": ("version 1", edit("hosts.txt", "h4 slots=1\n", ""), "but the hosts offer 4 slots"),
    "Windows text as hostfile": ("", put("hosts.txt", b"\xff\xfea\0"), "hosts.txt is UTF-16 text"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_is_one_diagnostic(load, good, mistake):
    kind, change, expected = MISTAKES[mistake]
    found = load(change(configuration(good, kind))).diagnostics
    assert 1 == len(found), [each.message for each in found]
    assert (Severity.ERROR, True) == (found[0].severity, expected in found[0].message), found[0].message


@pytest.mark.parametrize("kind", ["", "version 1", "version 2"])
def test_a_configuration_without_a_mistake_has_no_diagnostic(load, good, kind):
    assert [] == load(configuration(good, kind)).diagnostics


def test_files_named_in_the_wrong_order_are_one_mistake(tmp_path, good):
    for name, text in good.items():
        (tmp_path / name).write_text(text)
    hosts, bindings = tmp_path / "hosts.txt", tmp_path / "rank_bindings.yaml"
    (found,) = load_topology_files(bindings, hosts, environment={}, working_folder=tmp_path).diagnostics
    expected = "rank_bindings.yaml and hosts.txt are swapped: rank_bindings.yaml is a rank bindings file and hosts.txt is a hostfile"
    assert expected == found.message


def test_the_same_mistake_in_several_places_names_their_lines(load, good):
    (found,) = load(edit("rank_bindings.yaml", "mesh_id", "meshid")(configuration(good, "version 1"))).diagnostics
    assert ("the same again in lines 3, 4, 5 and 6",) == found.notes


@pytest.fixture
def check_mapping(tmp_path, good):
    """What is said about a mapping beside the good descriptor, and its counted parts."""
    (tmp_path / "mgd.yaml").write_text(good["mgd.yaml"])
    (tmp_path / "hosts.txt").write_text(good["hosts.txt"])

    def look(text):
        source, path = Source("mapping.yaml", text), tmp_path / "mapping.yaml"
        checked = check_file(source, Kind.MAPPING, path, environment={}, working_folder=tmp_path)
        return [each.message for each in checked.diagnostics], checked.content

    return look


def test_a_mapping_of_descriptors_is_checked_with_them(check_mapping):
    key = "subcontext_id_to_mesh_graph_descriptor"
    assert ([], "2 descriptors") == check_mapping(f"{key}:\n  0: mgd.yaml\n  1: mgd.yaml\n")
    missing = [f"`{key}` names `gone.yaml`, which does not exist"]
    assert (missing, "") == check_mapping(f"{key}:\n  0: mgd.yaml\n  1: gone.yaml\n")
    other = [f"`{key}` names `hosts.txt`, which is a hostfile; a mesh graph descriptor was expected"]
    assert (other, "") == check_mapping(f"{key}: {{0: hosts.txt}}\n")
    assert (["sub-context 2 stands where sub-context 1 was expected"], "") == check_mapping(
        f"{key}: {{0: mgd.yaml, 2: mgd.yaml}}\n"
    )


def test_a_mapping_of_mock_clusters_is_checked(check_mapping):
    key = "rank_to_cluster_mock_cluster_desc"
    assert ([], "1 mock cluster") == check_mapping(f"{key}: {{0: mgd.yaml}}\n")
    assert ([f"`{key}` names `gone.yaml`, which does not exist"], "") == check_mapping(f"{key}: {{0: gone.yaml}}\n")


def test_a_file_of_another_kind_than_was_said_is_one_mistake(tmp_path, good):
    for kind, what in (
        (Kind.HOSTS, "a hostfile"),
        (Kind.MGD, "a mesh graph descriptor"),
        (Kind.CLUSTER, "a cluster file"),
    ):
        source = Source("x.yaml", good["rank_bindings.yaml"])
        checked = check_file(source, kind, tmp_path / "x.yaml", environment={}, working_folder=tmp_path)
        expected = f"x.yaml is a rank bindings file; {what} was expected"
        assert [expected] == [each.message for each in checked.diagnostics]
