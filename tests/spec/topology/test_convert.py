"""Descriptors of either version, converted to the other and back: the same mesh graph, or a note."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch.diagnostics import Source, render
from ttlaunch.spec.topology.convert import convert, read_any

YAML = """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 4, E: 4, S: 4, W: 4}}
Board: [{name: Galaxy, type: TORUS_Y, topology: [8, 4]}]
Mesh: [
  {id: 0, board: Galaxy, device_topology: [8, 8], host_topology: [1, 2]},
  {id: 1, board: Galaxy, device_topology: [8, 8], host_topology: [1, 2]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
TEXTPROTO = """\
mesh_descriptors {
  name: "Galaxy"
  arch: WORMHOLE_B0
  device_topology { dims: [8, 8] dim_types: [RING, LINE] }
  host_topology { dims: [1, 2] }
  channels { count: 4 policy: STRICT }
}
graph_descriptors {
  name: "G0"
  type: "FABRIC"
  instances { mesh { mesh_descriptor: "Galaxy" mesh_id: 0 } }
  instances { mesh { mesh_descriptor: "Galaxy" mesh_id: 1 } }
  connections {
    nodes { mesh { mesh_descriptor: "Galaxy" mesh_id: 0 } }
    nodes { mesh { mesh_descriptor: "Galaxy" mesh_id: 1 } }
    channels { count: 2 policy: RELAXED }
  }
}
top_level_instance { graph { graph_descriptor: "G0" graph_id: 0 } }
"""
OLDEST = """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [{name: T3K, type: Mesh, topology: [2, 2]}]
Mesh: [{id: 0, board: T3K, topology: [1, 2], host_ranks: [[0, 1]]}]
Graph: []
"""
PORTS = """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 4, E: 4, S: 4, W: 4}}
Board: [{name: Galaxy, type: Mesh, topology: [4, 8]}, {name: Gate, type: Mesh, topology: [1, 1]}]
Mesh: [
  {id: 0, board: Gate, device_topology: [1, 1], host_topology: [1, 1], host_ranks: [[0]]},
  {id: 1, board: Galaxy, device_topology: [4, 8], host_topology: [1, 1], host_ranks: [[0]]},
]
Graph: [
  [[0, S0], [1, N0]],
  [[0, S1], [1, N4]],
  [[1, N0], [0, S0]],
  [[1, N4], [0, S1]],
]
"""


def converted(text, to):
    result = convert(Source("mgd", text), to=to)
    assert render(result.diagnostics) == ""
    return result.text, result.notes


def graph(text):
    found, _, diagnostics = read_any(Source("mgd", text))
    assert render(diagnostics) == ""
    return found


def test_yaml_becomes_textproto():
    assert converted(YAML, "textproto") == (TEXTPROTO, [])
    assert graph(YAML) == graph(TEXTPROTO)


def test_textproto_becomes_yaml():
    text, notes = converted(TEXTPROTO, "yaml")
    assert notes == []
    assert (
        text
        == """\
ChipSpec: {
  arch: wormhole_b0,
  ethernet_ports: {N: 4, E: 4, S: 4, W: 4}
}

Board: [
  {name: Galaxy, type: TORUS_Y, topology: [8, 4]},
]

Mesh: [
  {id: 0, board: Galaxy, device_topology: [8, 8], host_topology: [1, 2]},
  {id: 1, board: Galaxy, device_topology: [8, 8], host_topology: [1, 2]},
]

RelaxedGraph: [
  [M0, M1, 2],
]
"""
    )


def test_the_oldest_generation_is_counted_in_boards():
    (mesh,) = graph(OLDEST).meshes
    assert (mesh.device_shape, mesh.host_shape) == ((2, 4), (1, 2))
    assert graph(converted(OLDEST, "yaml")[0]) == graph(OLDEST)


def test_links_of_ports_become_links_of_devices():
    text, notes = converted(PORTS, "textproto")
    assert notes == ["links of ports were written as links of devices; which port of a device it is was left out"]
    (link,) = graph(text).links
    assert link.devices == ((0, 0, 1), (0, 1, 1))
    assert graph(text) == graph(PORTS) == graph(converted(text, "yaml")[0])


def test_a_ring_of_one_unknown_dimension_is_refused():
    result = convert(Source("mgd", OLDEST.replace("type: Mesh", "type: TORUS_1D")), to="textproto")
    assert result.text is None
    assert [d.message for d in result.diagnostics] == [
        "`type` is `TORUS_1D`, which does not determine which dimension is a ring"
    ]


def test_host_ranks_that_contradict_the_hosts_are_refused():
    result = convert(Source("mgd", PORTS.replace("[[0]]", "[[0, 1]]", 1)), to="yaml")
    assert [d.message for d in result.diagnostics] == [
        "`host_ranks` is a grid of [1, 2], but `host_topology` is [1, 1]"
    ]


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("policy: STRICT", "policy: RELAXED", "version 1 cannot express that the channels inside a mesh are RELAXED"),
        ("policy: RELAXED", "", "version 1 has no STRICT links of meshes; they were written as RELAXED ones"),
        (
            "top_level_instance",
            (
                "pinnings { logical_fabric_node_id { mesh_id: 0 chip_id: 0 }"
                " physical_asic_position { tray_id: 1 asic_location: 1 } }\ntop_level_instance"
            ),
            "version 1 has no pinnings; they were left out",
        ),
        (
            "channels { count: 4 policy: STRICT }",
            "channels { count: 4 } express_links { dim_idx: 0 }",
            "version 1 has no express links; they were left out",
        ),
        (
            "count: 2 policy: RELAXED }",
            "count: 2 policy: RELAXED } assign_z_direction: true",
            "version 1 cannot express which links use the Z ports",
        ),
        (
            "count: 2 policy: RELAXED }",
            "count: 2 policy: RELAXED } routing_direction: [N, S]",
            "version 1 has no routing directions for links of meshes; they were left out",
        ),
    ],
)
def test_what_yaml_cannot_say_gets_a_note(old, new, note):
    text = TEXTPROTO.replace(old, new, 1)
    _, notes = converted(text, "yaml")
    assert notes == [note]
    same, notes = converted(text, "textproto")
    assert notes == []
    assert convert(Source("mgd", same), to="textproto").text == same


@pytest.mark.parametrize(
    ("numbers", "lost"), [((7,), "switch 7 and its links were"), ((7, 9), "switches 7, 9 and their links were")]
)
def test_switches_that_yaml_cannot_say_are_named(numbers, lost):
    switch = (
        'switch_descriptors { name: "S" arch: WORMHOLE_B0 device_topology { dims: [1, 4] } channels { count: 4 } }\n'
    )
    rows = "".join(f'  instances {{ switch {{ switch_descriptor: "S" switch_id: {one} }} }}\n' for one in numbers)
    first = "  instances { mesh"
    _, notes = converted(switch + TEXTPROTO.replace(first, rows + first, 1), "yaml")
    assert [f"version 1 has no switches; {lost} left out"] == notes


def test_ports_that_textproto_cannot_say_get_a_note():
    text = YAML.replace("W: 4}", "W: 4, Z: 2}")
    assert converted(text, "textproto")[1] == ["version 2 does not say how many ports a chip has to the Z side (2)"]


def test_a_descriptor_with_mistakes_is_not_converted():
    result = convert(Source("mgd", YAML.replace("M1", "M2")), to="textproto")
    assert result.text is None
    assert [d.code for d in result.diagnostics] == ["T031"]


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8) | st.sampled_from(
    ["no", "null", "1", "0x1", "~", "a b", "'", '"', "\\", "#", "{", "\x7f", "lbox"]
)
EXTENT = st.integers(1, 4)


@st.composite
def descriptors(draw):
    """A descriptor of version 1 with a few meshes, and links of meshes or of devices."""
    count = draw(st.integers(1, 5))
    shape = st.tuples(EXTENT, EXTENT)
    boards = [
        (draw(NAMES), draw(st.sampled_from(["LINE", "RING"])), *draw(shape)) for _ in range(draw(st.integers(1, 3)))
    ]
    meshes = [(draw(st.sampled_from(boards)), draw(shape)) for _ in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    links = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return meshes, [(a, b, draw(st.integers(1, 4))) for a, b in links], draw(st.booleans())


def written(meshes, links, by_device):
    """The descriptor as text of version 2, with a name for each mesh."""
    parts, nodes = [], []
    for number, ((_, kind, rows, columns), (host_rows, host_columns)) in enumerate(meshes):
        parts.append(
            f'mesh_descriptors {{ name: "B{number}" arch: CPU host_topology {{ dims: [{host_rows}, {host_columns}] }}'
            f" device_topology {{ dims: [{rows * host_rows}, {columns * host_columns}] dim_types: [{kind}, LINE] }}"
            " channels { count: 2 } }"
        )
        nodes.append(f'mesh {{ mesh_descriptor: "B{number}" mesh_id: {number}')
    parts.append('graph_descriptors { name: "G0" type: "FABRIC"')
    parts += [f"instances {{ {node} }} }}" for node in nodes]
    device, policy = (" device_id: 0", "STRICT") if by_device else ("", "RELAXED")
    parts += [
        f"connections {{ nodes {{ {nodes[a]}{device} }} }} nodes {{ {nodes[b]}{device} }} }}"
        f" channels {{ count: {count} policy: {policy} }} }}"
        for a, b, count in links
    ]
    return "\n".join([*parts, "}", 'top_level_instance { graph { graph_descriptor: "G0" } }'])


@settings(max_examples=examples(100), deadline=None)
@given(descriptors())
def test_there_and_back_again_is_the_same_mesh_graph(described):
    original = read_any(Source("mgd", written(*described)))[0]
    there = convert(Source("mgd", written(*described)), to="yaml")
    assert read_any(Source("mgd", there.text))[0] == original
    back = convert(Source("mgd", there.text), to="textproto")
    assert read_any(Source("mgd", back.text))[0] == original
    assert convert(Source("mgd", back.text), to="yaml").text == there.text


@settings(max_examples=examples(200), deadline=None)
@given(NAMES)
def test_any_name_of_a_board_survives(name):
    text = YAML.replace("Galaxy", '"' + "".join(f"\\U{ord(character):08x}" for character in name) + '"')
    there = convert(Source("mgd", text), to="textproto")
    back = convert(Source("mgd", there.text), to="yaml")
    found = [read_any(Source("mgd", each))[0].meshes[0].board for each in (there.text, back.text)]
    assert found == [name, name]
