"""What correct files mean."""

import subprocess
import sys
from pathlib import Path

import pytest

from ttlaunch.diagnostics import Source
from ttlaunch.spec.topology.hosts import parse_hosts
from ttlaunch.spec.topology.load import load_topology, load_topology_files
from ttlaunch.spec.topology.model import ClusterSettings

REPOSITORY = Path(__file__).parents[3]


def slots(text):
    hosts, diagnostics = parse_hosts(Source("hosts.txt", text))
    assert diagnostics == []
    return [(host.user, host.name, host.slots, host.max_slots) for host in hosts]


def test_a_hostfile_alone_leaves_the_world_open(load):
    loaded = load({"mgd.yaml": None, "rank_bindings.yaml": None})
    assert loaded.topology.world_size is None
    assert loaded.topology.meshes == ()
    assert [file.name for file in loaded.files] == ["hosts.txt"]


def test_a_bare_host_has_a_slot_per_line():
    assert slots("a\nb\na\n") == [(None, "a", 2, None), (None, "b", 1, None)]


def test_a_line_may_name_user_address_and_limit():
    assert slots("joe@10.0.0.1 slots=2 max-slots=4 # lab\n") == [("joe", "10.0.0.1", 2, 4)]


def test_the_limit_alone_gives_the_slots():
    assert slots("a max_slots=4\n") == [(None, "a", 4, 4)]


def test_a_range_stands_for_its_hosts_in_order():
    assert [name for _, name, _, _ in slots("rack[1-2]-n[09-10,12] slots=8\n")] == [
        "rack1-n09",
        "rack1-n10",
        "rack1-n12",
        "rack2-n09",
        "rack2-n10",
        "rack2-n12",
    ]


def test_ranks_take_the_slots_in_the_order_of_the_file(load):
    topology = load({"hosts.txt": "b slots=1\na slots=2\n"}).topology
    assert [(slot.host.name, slot.index) for slot in topology.slots] == [("b", 0), ("a", 0), ("a", 1)]


def test_bindings_come_in_rank_order_with_their_meshes(load, good):
    rows = good["rank_bindings.yaml"].splitlines()
    topology = load({"rank_bindings.yaml": "\n".join([rows[0], rows[2], rows[1], rows[3]])}).topology
    assert [(binding.rank, binding.mesh_id) for binding in topology.bindings] == [(0, 1), (1, 0)]
    assert topology.world_size == 2
    assert topology.driven(topology.bindings[0]).device_shape == (1, 8)


def test_variables_are_expanded_on_the_launching_machine(load, good):
    text = good["rank_bindings.yaml"] + 'global_env: {HERE: "$HOME/x", THERE: "${A}${A}", COST: "5$ $ $1"}\n'
    topology = load({"rank_bindings.yaml": text}, environment={"HOME": "/home/me", "A": "$B"}).topology
    assert topology.global_environment == {"HERE": "/home/me/x", "THERE": "$B$B", "COST": "5$ $ $1"}


def test_links_between_devices_add_up_to_a_link_between_meshes(load, good):
    graph = "Graph: [\n  [[M0, D1], [M1, D1], 1],\n  [[M1, D2], [M0, D2], 3],\n]\n"
    links = load({"mgd.yaml": good["mgd.yaml"].split("RelaxedGraph")[0] + graph}).topology.links
    assert [(link.a, link.b, link.channels) for link in links] == [(0, 1, 4)]


def test_block_style_and_letter_case_do_not_matter(load, good):
    text = """\
ChipSpec:
  arch: Wormhole_B0
  ethernet_ports: {N: 2, E: 2, S: 2, W: 2, Z: 1}
Board:
  - name: lbox
    type: mesh
    topology: [1, 8]
Mesh:
  - {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]}
  - id: 1
    board: lbox
    device_topology:
      - 1
      - 8
    host_topology: [1, 1]
RelaxedGraph:
  - [M1, M0, 2]
"""
    theirs, ours = load({"mgd.yaml": text}).topology, load({}).topology
    assert (theirs.arch, theirs.meshes, theirs.links) == (ours.arch, ours.meshes, ours.links)


def test_every_setting_of_a_cluster_file_arrives(load):
    text = """\
user: joe
port: 2222
identity_file: ~/.ssh/lab
remote_folder: /scratch/ttlaunch
python: /opt/venv/bin/python
mpi_prefix: /opt/openmpi
network: 10.0.0.0/24
environment: {DATA: "$HOME/data"}
"""
    cluster = load({"cluster.yaml": text}, environment={"HOME": "/home/joe"}).topology.cluster
    expected = ClusterSettings(
        user="joe",
        port=2222,
        identity_file="~/.ssh/lab",
        remote_folder="/scratch/ttlaunch",
        python="/opt/venv/bin/python",
        mpi_prefix="/opt/openmpi",
        network="10.0.0.0/24",
        environment={"DATA": "/home/joe/data"},
    )
    assert expected == cluster


def test_a_cluster_file_of_comments_changes_nothing(load):
    assert load({"cluster.yaml": "# user: joe\n"}).topology.cluster == ClusterSettings()


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("mgd.yaml", "beside rank_bindings.yaml"),
        ("configurations/lab/mgd.yaml", "above it"),
        ("here.yaml", "the current folder"),
    ],
)
def test_a_descriptor_is_found_beside_above_or_here(path, place, tmp_path, good):
    folder, here = tmp_path / "repository" / "configurations" / "lab", tmp_path / "elsewhere"
    for name, text in good.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace('"mgd.yaml"', f'"{path}"'))
    (tmp_path / "repository" / ".git").mkdir()
    here.mkdir()
    (here / "here.yaml").write_text(good["mgd.yaml"])
    loaded = load_topology(folder, name="lab", environment={}, working_folder=here)
    assert place == loaded.descriptor_found
    assert loaded.topology.mesh_graph_path == (here / path if path == "here.yaml" else folder / "mgd.yaml")


def test_a_descriptor_outside_the_repository_is_not_found(tmp_path, good):
    folder = tmp_path / "repository" / "lab"
    folder.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    (tmp_path / "mgd2.yaml").write_text(good["mgd.yaml"])
    for name, text in good.items():
        (folder / name).write_text(text.replace('"mgd.yaml"', '"mgd2.yaml"'))
    loaded = load_topology(folder, name="lab", environment={}, working_folder=folder)
    assert loaded.topology is None


def test_files_can_be_named_one_by_one(tmp_path, good):
    for name, text in good.items():
        (tmp_path / name.replace("hosts", "other hosts")).write_text(text)
    loaded = load_topology_files(
        Path("other hosts.txt"), Path("rank_bindings.yaml"), environment={}, working_folder=tmp_path
    )
    assert loaded.diagnostics == []
    assert loaded.topology.world_size == 2
    assert loaded.topology.folder is None


def test_a_file_is_called_as_the_user_would_type_it(tmp_path):
    lab, here = tmp_path / "lab", tmp_path / "here"
    lab.mkdir()
    here.mkdir()
    (lab / "hosts.txt").write_text("a foo\n")
    inside = load_topology(Path("lab"), name="lab", environment={}, working_folder=tmp_path)
    outside = load_topology_files(Path("../lab/hosts.txt"), None, environment={}, working_folder=here)
    assert str(inside.diagnostics[0].primary.span) == "lab/hosts.txt:1:3"
    assert str(outside.diagnostics[0].primary.span) == "../lab/hosts.txt:1:3"


@pytest.mark.parametrize("name", ["my lab", "a;b", "$HOME", "'quoted'", 'do"uble', "line\nend", "-dash", "ü"])
def test_folders_may_have_nasty_names(name, tmp_path, good):
    folder = tmp_path / name
    folder.mkdir()
    for file, text in good.items():
        (folder / file).write_text(text)
    loaded = load_topology(folder, name=name, environment={}, working_folder=tmp_path)
    assert loaded.diagnostics == []
    (folder / "hosts.txt").write_text("a slots=x\n")
    broken = load_topology(folder, name=name, environment={}, working_folder=tmp_path)
    assert "\n" not in str(broken.diagnostics[0].primary.span)


@pytest.mark.parametrize("name", ["local", "2loudboxes", "5loudboxes"])
def test_the_configurations_that_come_with_it_are_correct(name):
    folder = REPOSITORY / "configurations" / name
    loaded = load_topology(folder, name=name, environment={"HOME": "/home/joe"}, working_folder=REPOSITORY)
    assert loaded.diagnostics == []


def test_a_hostfile_alone_needs_neither_pydantic_nor_yaml():
    program = f"""
import sys
from pathlib import Path
from ttlaunch.spec.topology.load import load_topology
folder = Path({str(REPOSITORY / "configurations" / "local")!r})
assert load_topology(folder, name="local", environment={{}}, working_folder=folder).topology
print(sorted({{"pydantic", "yaml", "difflib", "json"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere does not exist; a configuration folder was expected"),
        ("file", "file is not a folder; a configuration folder was expected"),
        ("x" * 300, "x" * 300 + " does not exist; a configuration folder was expected"),
        ("a\0b", "a\\x00b does not exist; a configuration folder was expected"),
    ],
)
def test_a_folder_that_is_none_is_named(name, message, tmp_path):
    (tmp_path / "file").write_text("")
    loaded = load_topology(Path(name), name="lab", environment={}, working_folder=tmp_path)
    assert message == loaded.diagnostics[0].message
    assert loaded.topology is None
