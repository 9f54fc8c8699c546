"""What is said about mistakes in a mesh graph descriptor of version 2, and what a correct one means."""

import pytest

from ttlaunch.diagnostics import Source, render
from ttlaunch.draw.scene import make_scene
from ttlaunch.planning.environment import plan_rank_environment
from ttlaunch.spec.located.codes import TOPOLOGY
from ttlaunch.spec.topology.mesh_graph import counted_parts
from ttlaunch.spec.topology.textproto import Message, parse_textproto

GOOD = """\
mesh_descriptors {
  name: "M0"
  arch: WORMHOLE_B0
  device_topology { dims: [1, 8] }
  host_topology { dims: [1, 1] }
  channels { count: 2 }
}
graph_descriptors {
  name: "G0"
  type: "FABRIC"
  instances { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
  instances { mesh { mesh_descriptor: "M0" mesh_id: 1 } }
  connections {
    nodes { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
    nodes { mesh { mesh_descriptor: "M0" mesh_id: 1 } }
    channels { count: 2 }
  }
}
top_level_instance { graph { graph_descriptor: "G0" graph_id: 0 } }
"""


@pytest.fixture
def check_change(check):
    """Compare what is said about the good descriptor with one stretch of it replaced."""

    def check_text(old, new, expected):
        assert GOOD.count(old) >= 1
        check({"mgd.yaml": None, "mgd.textproto": GOOD.replace(old, new, 1), "rank_bindings.yaml": BINDINGS}, expected)

    return check_text


BINDINGS = """\
rank_bindings:
  - {rank: 0, mesh_id: 0}
  - {rank: 1, mesh_id: 1}
mesh_graph_desc_path: "mgd.textproto"
"""


def test_the_good_descriptor_is_good(load):
    topology = load({"mgd.yaml": GOOD}).topology
    assert [(mesh.id, mesh.device_shape, mesh.host_shape, mesh.channels) for mesh in topology.meshes] == [
        (0, (1, 8), (1, 1), 2),
        (1, (1, 8), (1, 1), 2),
    ]
    assert [(link.a, link.b, link.channels, link.policy) for link in topology.links] == [(0, 1, 2, "STRICT")]
    assert topology.arch == "wormhole_b0"


def meaning(load, *changes):
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    loaded = load({"mgd.yaml": text})
    assert render(loaded.diagnostics) == ""
    return loaded.topology


def test_angle_brackets_lists_and_separators_change_nothing(load):
    plain = meaning(load)
    assert meaning(load, ("[1, 8]", "1, dims: 8;"), ("channels { count: 2 }", "channels: < count: 0x2, >")) == plain
    assert (
        meaning(load, ('"M0"', "'M' '\\x30'"), ("{", ": {"), ("mesh_descriptors :", "# note\nmesh_descriptors"))
        == plain
    )


def test_dim_types_have_an_older_name(load):
    for name in ("dim_types", "types"):
        topology = meaning(load, ("dims: [1, 8]", f"dims: [1, 8] {name}: [LINE, RING]"))
        assert topology.meshes[0].dim_types == ("LINE", "RING")


def test_links_of_devices_are_kept_and_add_up(load):
    node = 'nodes { mesh { mesh_descriptor: "M0" mesh_id: %d device_id: %d } }'
    rows = [f"connections {{ {node % (0, d)} {node % (1, d + 1)} channels {{ count: {d} }} }}" for d in (1, 2)]
    start = GOOD.index("  connections")
    text = GOOD[:start] + "\n".join(rows) + "\n}\ntop_level" + GOOD.split("top_level")[1]
    (link,) = load({"mgd.yaml": text}).topology.links
    assert (link.channels, link.devices, link.policy) == (3, ((1, 2, 1), (2, 3, 2)), "STRICT")


@pytest.mark.parametrize(
    ("layout", "pairs"), [("ALL_TO_ALL", {(0, 1), (0, 2), (1, 2)}), ("RING", {(0, 1), (0, 2), (1, 2)})]
)
def test_a_graph_by_rule_has_its_links(load, layout, pairs):
    start = GOOD.index("  connections")
    text = GOOD[:start] + '  instances { mesh { mesh_descriptor: "M0" mesh_id: 2 } }\n'
    text += (
        f"  graph_topology {{ layout_type: {layout} channels {{ count: 2 }} }}\n}}\ntop_level"
        + GOOD.split("top_level")[1]
    )
    topology = load({"mgd.yaml": text}).topology
    assert {(link.a, link.b) for link in topology.links} == pairs


def with_switch(number):
    """The good descriptor with a switch that joins its two meshes."""
    switch = (
        'switch_descriptors { name: "S0" arch: WORMHOLE_B0 device_topology { dims: [2, 4] } channels { count: 2 } }\n'
    )
    start = GOOD.index("  connections")
    text = switch + GOOD[:start] + '  instances { switch { switch_descriptor: "S0" switch_id: ' + f"{number} }} }}\n"
    for mesh in (0, 1):
        text += f'connections {{ nodes {{ mesh {{ mesh_descriptor: "M0" mesh_id: {mesh} device_id: 3 }} }}'
        text += f' nodes {{ switch {{ switch_descriptor: "S0" switch_id: {number} }} }} channels {{ count: 1 }} }}\n'
    return text + "}\ntop_level" + GOOD.split("top_level")[1]


def bound(*meshes):
    rows = "".join(f"  - {{rank: {rank}, mesh_id: {mesh}}}\n" for rank, mesh in enumerate(meshes))
    return f'rank_bindings:\n{rows}mesh_graph_desc_path: "mgd.yaml"\n'


def test_a_switch_joins_meshes(load):
    loaded = load({"mgd.yaml": with_switch(0)})
    assert render(loaded.diagnostics) == ""
    assert [(link.switch, link.other, link.devices) for link in loaded.topology.switch_links] == [
        (0, 0, (None, 3)),
        (0, 1, (None, 3)),
    ]


def test_a_rank_may_drive_a_switch(load, tmp_path):
    files = {"hosts.txt": "a\nb\nc\n", "mgd.yaml": with_switch(2), "rank_bindings.yaml": bound(0, 1, 2)}
    loaded = load(files)
    assert render(loaded.diagnostics) == ""
    topology = loaded.topology
    assert ["mesh 0", "mesh 1", "switch 2"] == [str(topology.driven(binding)) for binding in topology.bindings]
    assert "2" == plan_rank_environment(2, topology.bindings[2], topology)["TT_MESH_ID"]
    assert ["2 meshes", "1 switch", "2 links"] == counted_parts(topology)
    boxes = make_scene(topology, None).boxes
    assert [("switch 2", ("c",))] == [(box.name, box.hosts) for box in boxes if box.name.startswith("switch")]


def test_a_host_drives_a_switch_or_meshes_but_not_both(check):
    files = {"hosts.txt": "a\nb slots=2\n", "mgd.yaml": with_switch(2), "rank_bindings.yaml": bound(0, 1, 2)}
    expected = """\
error[T063]: rank 2 drives switch 2 on host `b`, where rank 1 drives mesh 1
 --> rank_bindings.yaml:4:24
  |
4 |   - {rank: 2, mesh_id: 2}
  |                        ^ a switch
 --> rank_bindings.yaml:3:24
  |
3 |   - {rank: 1, mesh_id: 1}
  |                        - a mesh of the same host

hint: bind the switch to a rank of another host: rank r takes the r-th slot of the hostfile
"""
    check(files, expected)


def test_a_binding_to_a_missing_mesh_lists_the_switches_too(check):
    files = {"hosts.txt": "a\nb\nc\n", "mgd.yaml": with_switch(2), "rank_bindings.yaml": bound(0, 1, 7)}
    expected = """\
error[T011]: rank 2 is bound to mesh 7, which does not exist
 --> rank_bindings.yaml:4:24
  |
4 |   - {rank: 2, mesh_id: 7}
  |                        ^ no mesh or switch has id 7
 --> mgd.yaml:2:1
  |
2 | mesh_descriptors {
  | ---------------- this graph defines meshes 0, 1 and switch 2
"""
    check(files, expected)


def test_two_ranks_of_one_switch_are_marked(load):
    files = {"hosts.txt": "a\nb\nc\nd\n", "mgd.yaml": with_switch(2), "rank_bindings.yaml": bound(0, 1, 2, 2)}
    assert ["ranks 2 and 3 both drive switch 2"] == [each.message for each in load(files).diagnostics]


@pytest.mark.parametrize(
    ("written", "value"),
    [("3", 3), ("-3", -3), ("0x1F", 31), ("017", 15), ("2.5e3", 2500.0), (".5f", 0.5), ("WORD", "WORD"),
     ('"a" \'b\'', "ab"), ('"\\n\\101\\x41\\u00e9\\303\\251"', "\nAA\u00e9\u00e9"), ('"#"', "#"), ('"\\""', '"')],
)  # fmt: skip
def test_a_value_is_read(written, value):
    message, found = parse_textproto(Source("m", f"a: {written} # end"), codes=TOPOLOGY)
    assert found == []
    assert isinstance(message, Message)
    assert message.fields[0].value.value == value


def test_values_know_their_places():
    message, _ = parse_textproto(Source("m", "a {\n  b: [1,\n 22] }\n"), codes=TOPOLOGY)
    inner = message.fields[0].value.fields
    assert [(str(field.span), str(field.value.span), field.value.span.length) for field in inner] == [
        ("m:2:3", "m:2:7", 1),
        ("m:2:3", "m:3:2", 2),
    ]


@pytest.mark.parametrize(
    "text", ["a{" * 5000, "a:[" * 5000, "a<" * 5000, "}" * 5000, '"' * 5001, "a: [1," * 3000, "-" * 9999]
)
def test_a_bomb_is_one_diagnostic(text):
    message, found = parse_textproto(Source("m", text), codes=TOPOLOGY)
    assert message is None
    assert len(found) == 1
    assert render(found)


def test_an_unknown_field_is_marked(check_change):
    expected = """\
error[T004]: unknown key `chanels` in a mesh descriptor
 --> mgd.textproto:6:3
  |
6 |   chanels { count: 2 }
  |   ^^^^^^^ expected `channels`, `express_connections` or `express_links`

hint: did you mean `channels`?
"""
    check_change("  channels { count: 2 }\n}", "  chanels { count: 2 }\n}", expected)


def test_a_name_without_quotes_is_refused(check_change):
    expected = """\
error[T005]: `name` is `M0` without quotes; text was expected
 --> mgd.textproto:2:9
  |
2 |   name: M0
  |         ^^ write "M0"
"""
    check_change('name: "M0"', "name: M0", expected)


def test_a_word_in_quotes_is_refused(check_change):
    expected = """\
error[T005]: `arch` is "WORMHOLE_B0" in quotes; a word was expected
 --> mgd.textproto:3:9
  |
3 |   arch: "WORMHOLE_B0"
  |         ^^^^^^^^^^^^^ remove the quotes: `WORMHOLE_B0`, `BLACKHOLE`, `QUASAR`, `CPU` or `CUDA`
"""
    check_change("WORMHOLE_B0", '"WORMHOLE_B0"', expected)


def test_an_architecture_in_small_letters_is_refused(check_change):
    expected = """\
error[T005]: `arch` is `wormhole_b0`; `WORMHOLE_B0`, `BLACKHOLE`, `QUASAR`, `CPU` or `CUDA` was expected
 --> mgd.textproto:3:9
  |
3 |   arch: wormhole_b0
  |         ^^^^^^^^^^^ expected `WORMHOLE_B0`, `BLACKHOLE`, `QUASAR`, `CPU` or `CUDA`

hint: did you mean `WORMHOLE_B0`?
"""
    check_change("WORMHOLE_B0", "wormhole_b0", expected)


def test_an_empty_name_is_refused(check_change):
    expected = """\
error[T005]: `name` is ""; text that is not empty was expected
 --> mgd.textproto:9:9
  |
9 |   name: ""
  |         ^^ expected text that is not empty
"""
    check_change('name: "G0"', 'name: ""', expected)


def test_a_field_given_twice_is_refused(check_change):
    expected = """\
error[T007]: field `type` is given twice
  --> mgd.textproto:10:18
   |
10 |   type: "FABRIC" type: "FABRIC"
   |                  ^^^^ and again here
  --> mgd.textproto:10:3
   |
10 |   type: "FABRIC" type: "FABRIC"
   |   ---- first given here
"""
    check_change('type: "FABRIC"', 'type: "FABRIC" type: "FABRIC"', expected)


def test_a_list_of_two_for_one_value_is_one_mistake(check_change):
    expected = """\
error[T005]: `type` is a list of 2 items; text was expected
  --> mgd.textproto:10:3
   |
10 |   type: ["FABRIC", "POD"]
   |   ^^^^ expected text
"""
    check_change('type: "FABRIC"', 'type: ["FABRIC", "POD"]', expected)


def test_a_list_for_one_value_is_refused(check_change):
    expected = """\
error[T005]: `type` is a list of 1 item; text was expected
  --> mgd.textproto:10:3
   |
10 |   type: ["FABRIC"]
   |   ^^^^ expected text
"""
    check_change('type: "FABRIC"', 'type: ["FABRIC"]', expected)


def test_no_hosts_are_refused(check_change):
    expected = """\
error[T005]: item 2 of `dims` is `0`; a number of at least 1 was expected
 --> mgd.textproto:5:29
  |
5 |   host_topology { dims: [1, 0] }
  |                             ^ expected a number of at least 1
"""
    check_change("dims: [1, 1]", "dims: [1, 0]", expected)


def test_three_dims_are_refused(check_change):
    expected = """\
error[T005]: `dims` is a list of 3 items; at most 2 items were expected
 --> mgd.textproto:4:21
  |
4 |   device_topology { dims: [1, 8, 1] }
  |                     ^^^^ expected at most 2 items
"""
    check_change("dims: [1, 8]", "dims: [1, 8, 1]", expected)


def test_no_channels_are_refused(check_change):
    expected = """\
error[T005]: `count` is `0`; a number of at least 1 was expected
 --> mgd.textproto:6:21
  |
6 |   channels { count: 0 }
  |                     ^ expected a number of at least 1
"""
    check_change("count: 2", "count: 0", expected)


def test_hosts_that_cannot_share_the_devices_are_refused(check_change):
    expected = """\
error[T036]: `M0` has [1, 8] devices, which its [1, 3] hosts cannot share evenly
 --> mgd.textproto:5:19
  |
5 |   host_topology { dims: [1, 3] }
  |                   ^^^^ hosts
 --> mgd.textproto:4:21
  |
4 |   device_topology { dims: [1, 8] }
  |                     ---- devices
"""
    check_change("dims: [1, 1]", "dims: [1, 3]", expected)


def test_dim_types_of_another_length_are_refused(check_change):
    expected = """\
error[T053]: `M0` has 1 `dim_types` for 2 `dims`
 --> mgd.textproto:4:34
  |
4 |   device_topology { dims: [1, 8] dim_types: [LINE] }
  |                                  ^^^^^^^^^ expected 2
"""
    check_change("dims: [1, 8]", "dims: [1, 8] dim_types: [LINE]", expected)


def test_an_unknown_dim_type_is_refused(check_change):
    expected = """\
error[T005]: item 2 of `dim_types` is `TORUS`; `LINE` or `RING` was expected
 --> mgd.textproto:4:52
  |
4 |   device_topology { dims: [1, 8] dim_types: [LINE, TORUS] }
  |                                                    ^^^^^ expected `LINE` or `RING`
"""
    check_change("dims: [1, 8]", "dims: [1, 8] dim_types: [LINE, TORUS]", expected)


def test_a_ring_of_one_is_a_warning(check_change):
    expected = """\
warning[T042]: mesh 0 has a ring of 1 row, which is no more than a line
  --> mgd.textproto:11:53
   |
11 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
   |                                                     ^ 1 × 8 devices
"""
    check_change("dims: [1, 8]", "dims: [1, 8] dim_types: [RING, LINE]", expected)


def test_express_connections_are_refused(check_change):
    expected = """\
error[T051]: `M0` has `express_connections`, which the runtime does not take
 --> mgd.textproto:7:3
  |
7 |   express_connections { src: 0 dst: 4 }
  |   ^^^^^^^^^^^^^^^^^^^

hint: remove them
"""
    check_change(
        "  channels { count: 2 }\n}", "  channels { count: 2 }\n  express_connections { src: 0 dst: 4 }\n}", expected
    )


def test_express_links_along_a_missing_dimension_are_refused(check_change):
    expected = """\
error[T038]: `M0` has express links along dimension 2 of 2
 --> mgd.textproto:7:28
  |
7 |   express_links { dim_idx: 2 pattern { start: 0 step: 2 } wrap: RING }
  |                            ^ expected 0 or 1
"""
    check_change(
        "  channels { count: 2 }\n}",
        "  channels { count: 2 }\n  express_links { dim_idx: 2 pattern { start: 0 step: 2 } wrap: RING }\n}",
        expected,
    )


@pytest.mark.parametrize("wrap", ["", "wrap: LINE", "wrap: RING"])
def test_express_links_go_along_a_line_or_a_ring(check_change, wrap):
    links = f"  express_links {{ dim_idx: 1 pattern {{ start: 0 step: 2 }} {wrap} }}\n"
    check_change("  channels { count: 2 }\n}", f"  channels {{ count: 2 }}\n{links}}}", "")


def test_the_wrap_of_express_links_is_no_flag(check_change):
    expected = """\
error[T005]: `wrap` is `true`; `LINE` or `RING` was expected
 --> mgd.textproto:7:34
  |
7 |   express_links { dim_idx: 1 wrap: true }
  |                                    ^^^^ expected `LINE` or `RING`
"""
    expected = expected.replace("7:34", "7:36")
    links = "  express_links { dim_idx: 1 wrap: true }\n"
    check_change("  channels { count: 2 }\n}", f"  channels {{ count: 2 }}\n{links}}}", expected)


def test_an_instance_of_a_missing_descriptor_is_refused(check_change):
    expected = """\
error[T045]: a reference names mesh descriptor `M`, which does not exist
  --> mgd.textproto:12:39
   |
12 |   instances { mesh { mesh_descriptor: "M" mesh_id: 1 } }
   |                                       ^^^ expected `M0`

hint: did you mean `M0`?
"""
    check_change('{ mesh_descriptor: "M0" mesh_id: 1 } }\n  c', '{ mesh_descriptor: "M" mesh_id: 1 } }\n  c', expected)


def test_an_instance_twice_is_refused(check_change):
    expected = """\
error[T029]: mesh 0 is defined twice
  --> mgd.textproto:12:53
   |
12 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
   |                                                     ^ and again here
  --> mgd.textproto:11:53
   |
11 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
   |                                                     - first defined here
"""
    check_change("mesh_id: 1 } }\n  c", "mesh_id: 0 } }\n  c", expected)


def test_a_gap_in_the_ids_is_a_warning(check_change):
    expected = """\
warning[T030]: mesh ids have a gap: there is a mesh 3 but no mesh 2
  --> mgd.textproto:13:53
   |
13 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 3 } }
   |                                                     ^ expected 2

warning[T040]: no link leads from mesh 0 to mesh 3
  --> mgd.textproto:13:53
   |
13 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 3 } }
   |                                                     ^ not connected
  --> mgd.textproto:11:53
   |
11 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
   |                                                     -

warning[T022]: no rank drives mesh 3
  --> mgd.textproto:13:53
   |
13 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 3 } }
   |                                                     ^ idle
  --> rank_bindings.yaml:1:1
   |
 1 | rank_bindings:
   | ------------- these bind 2 ranks
"""
    check_change(
        '  instances { mesh { mesh_descriptor: "M0" mesh_id: 1 } }\n',
        '  instances { mesh { mesh_descriptor: "M0" mesh_id: 1 } }\n  instances { mesh { mesh_descriptor: "M0" mesh_id: 3 } }\n',
        expected,
    )


def test_another_kind_of_graph_is_refused(check_change):
    expected = """\
error[T047]: graph `G0` has type "POD"; the runtime takes "FABRIC"
  --> mgd.textproto:10:9
   |
10 |   type: "POD"
   |         ^^^^^ expected "FABRIC"
"""
    check_change('"FABRIC"', '"POD"', expected)


def test_two_graphs_are_refused(check_change):
    expected = """\
error[T047]: the descriptor has 2 graphs; the runtime takes one
  --> mgd.textproto:19:27
   |
19 | graph_descriptors { name: "G1" type: "FABRIC" instances { mesh { mesh_descriptor: "M0" } } }
   |                           ^^^^ the second
  --> mgd.textproto:9:9
   |
 9 |   name: "G0"
   |         ---- the first
"""
    check_change(
        "top_level_instance",
        'graph_descriptors { name: "G1" type: "FABRIC" instances { mesh { mesh_descriptor: "M0" } } }\ntop_level_instance',
        expected,
    )


def test_two_descriptors_of_one_name_are_refused(check_change):
    expected = """\
error[T046]: descriptor `M0` is defined twice
 --> mgd.textproto:8:26
  |
8 | mesh_descriptors { name: "M0" arch: WORMHOLE_B0 device_topology { dims: [1, 8] } host_topology { dims: [1, 1] } channels { count: 2 } }
  |                          ^^^^ and again here
 --> mgd.textproto:2:9
  |
2 |   name: "M0"
  |         ---- first defined here
"""
    check_change(
        "graph_descriptors",
        'mesh_descriptors { name: "M0" arch: WORMHOLE_B0 device_topology { dims: [1, 8] } host_topology { dims: [1, 1] } channels { count: 2 } }\ngraph_descriptors',
        expected,
    )


def test_two_architectures_are_refused(check_change):
    expected = """\
error[T048]: descriptor `M1` has arch BLACKHOLE, others have WORMHOLE_B0
 --> mgd.textproto:8:37
  |
8 | mesh_descriptors { name: "M1" arch: BLACKHOLE device_topology { dims: [1, 8] } host_topology { dims: [1, 1] } channels { count: 2 } }
  |                                     ^^^^^^^^^ expected WORMHOLE_B0
 --> mgd.textproto:3:9
  |
3 |   arch: WORMHOLE_B0
  |         ----------- the first one
"""
    check_change(
        "graph_descriptors",
        'mesh_descriptors { name: "M1" arch: BLACKHOLE device_topology { dims: [1, 8] } host_topology { dims: [1, 1] } channels { count: 2 } }\ngraph_descriptors',
        expected,
    )


def test_a_root_with_a_missing_graph_is_refused(check_change):
    expected = """\
error[T045]: a reference names graph descriptor `G9`, which does not exist
  --> mgd.textproto:19:48
   |
19 | top_level_instance { graph { graph_descriptor: "G9" graph_id: 0 } }
   |                                                ^^^^ expected `G0`
"""
    check_change(
        'top_level_instance { graph { graph_descriptor: "G0"',
        'top_level_instance { graph { graph_descriptor: "G9"',
        expected,
    )


def test_a_root_with_another_number_is_refused(check_change):
    expected = """\
error[T050]: the root has `graph_id` 7; 0 was expected
  --> mgd.textproto:19:63
   |
19 | top_level_instance { graph { graph_descriptor: "G0" graph_id: 7 } }
   |                                                               ^ expected 0
"""
    check_change("graph_id: 0", "graph_id: 7", expected)


def test_a_file_without_a_root_is_refused(check_change):
    expected = """\
error[T006]: `top_level_instance` is missing in a mesh graph descriptor
 --> mgd.textproto:1:1
  |
1 | mesh_descriptors {
  | ^^^^^^^^^^^^^^^^^^ has no `top_level_instance`
"""
    check_change('top_level_instance { graph { graph_descriptor: "G0" graph_id: 0 } }\n', "", expected)


def test_a_root_that_names_nothing_is_refused(check_change):
    expected = """\
error[T005]: a reference names nothing; one of `mesh`, `graph` and `switch` was expected
  --> mgd.textproto:19:1
   |
19 | top_level_instance { }
   | ^^^^^^^^^^^^^^^^^^
"""
    check_change(
        'top_level_instance { graph { graph_descriptor: "G0" graph_id: 0 } }', "top_level_instance { }", expected
    )


def test_a_link_to_a_missing_mesh_is_refused(check_change):
    expected = """\
error[T031]: a link names mesh 2, which does not exist
  --> mgd.textproto:15:51
   |
15 |     nodes { mesh { mesh_descriptor: "M0" mesh_id: 2 } }
   |                                                   ^ no mesh has id 2
"""
    check_change("mesh_id: 1 } }\n    channels", "mesh_id: 2 } }\n    channels", expected)


def test_a_link_to_itself_is_refused(check_change):
    expected = """\
error[T032]: a link connects mesh 0 to itself
  --> mgd.textproto:15:51
   |
15 |     nodes { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
   |                                                   ^ expected another mesh
"""
    check_change("mesh_id: 1 } }\n    channels", "mesh_id: 0 } }\n    channels", expected)


def test_a_link_by_another_name_is_refused(check_change):
    expected = """\
error[T045]: a link calls mesh 1 `M1`, but it is made of `M0`
  --> mgd.textproto:15:37
   |
15 |     nodes { mesh { mesh_descriptor: "M1" mesh_id: 1 } }
   |                                     ^^^^ expected `M0`
  --> mgd.textproto:12:53
   |
12 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 1 } }
   |                                                     - defined here
"""
    check_change(
        '{ mesh_descriptor: "M0" mesh_id: 1 } }\n    channels',
        '{ mesh_descriptor: "M1" mesh_id: 1 } }\n    channels',
        expected,
    )


def test_a_link_to_a_missing_device_is_refused(check_change):
    expected = """\
error[T038]: a link names device 8 of mesh 1, which has 8 devices
  --> mgd.textproto:15:64
   |
15 |     nodes { mesh { mesh_descriptor: "M0" mesh_id: 1 device_id: 8 } }
   |                                                                ^ expected 0 to 7
"""
    check_change("mesh_id: 1 } }\n    channels", "mesh_id: 1 device_id: 8 } }\n    channels", expected)


def test_three_nodes_are_refused(check_change):
    expected = """\
error[T052]: a connection has 3 `nodes`; 2 were expected
  --> mgd.textproto:13:15
   |
13 |   connections {
   |               ^ expected two `nodes { … }`
"""
    check_change("    channels", '    nodes { mesh { mesh_descriptor: "M0" mesh_id: 1 } }\n    channels', expected)


def test_a_directional_link_is_refused(check_change):
    expected = """\
error[T051]: a connection is `directional`, which the runtime does not take
  --> mgd.textproto:16:18
   |
16 |     directional: true
   |                  ^^^^ expected `false`, or nothing
"""
    check_change("    channels", "    directional: true\n    channels", expected)


def test_a_link_twice_is_refused(check_change):
    expected = """\
error[T033]: the link between mesh 0 and mesh 1 is given twice
  --> mgd.textproto:16:51
   |
16 |     nodes { mesh { mesh_descriptor: "M0" mesh_id: 1 } }
   |                                                   ^ and again here
  --> mgd.textproto:13:63
   |
13 |   connections { nodes { mesh { mesh_descriptor: "M0" mesh_id: 1 } } nodes { mesh { mesh_descriptor: "M0" } } channels { count: 1 } }
   |                                                               - first given here
"""
    check_change(
        "  connections",
        '  connections { nodes { mesh { mesh_descriptor: "M0" mesh_id: 1 } } nodes { mesh { mesh_descriptor: "M0" } } channels { count: 1 } }\n  connections',
        expected,
    )


def test_two_policies_are_refused(check_change):
    expected = """\
error[T049]: a connection is STRICT, the first one of its graph RELAXED
  --> mgd.textproto:17:5
   |
17 |     channels { count: 2 }
   |     ^^^^^^^^
  --> mgd.textproto:13:151
   |
13 | …esh { mesh_descriptor: "M0" } } channels { count: 1 policy: RELAXED } }
   |                                                              ------- RELAXED here
"""
    check_change(
        "  connections",
        '  connections { nodes { mesh { mesh_descriptor: "M0" mesh_id: 1 device_id: 3 } } nodes { mesh { mesh_descriptor: "M0" } } channels { count: 1 policy: RELAXED } }\n  connections',
        expected,
    )


def test_a_rule_and_connections_are_refused(check_change):
    expected = """\
error[T028]: the graph has both `graph_topology` and `connections`; one of them was expected
  --> mgd.textproto:14:3
   |
14 |   connections {
   |   ^^^^^^^^^^^
  --> mgd.textproto:13:3
   |
13 |   graph_topology { layout_type: RING channels { count: 1 } }
   |   -------------- the other is here
"""
    check_change(
        "  connections", "  graph_topology { layout_type: RING channels { count: 1 } }\n  connections", expected
    )


def test_a_pinning_twice_is_refused(check_change):
    expected = """\
error[T054]: device 1 of mesh 0 is pinned twice
  --> mgd.textproto:21:48
   |
21 |   logical_fabric_node_id { mesh_id: 0 chip_id: 1 }
   |                                                ^ and again here
  --> mgd.textproto:20:48
   |
20 |   logical_fabric_node_id { mesh_id: 0 chip_id: 1 }
   |                                                - first pinned here
"""
    check_change(
        "top_level_instance",
        "pinnings {\n  logical_fabric_node_id { mesh_id: 0 chip_id: 1 }\n  logical_fabric_node_id { mesh_id: 0 chip_id: 1 }\n  physical_asic_position { tray_id: 1 asic_location: 1 }\n}\ntop_level_instance",
        expected,
    )


def test_a_pinning_of_a_missing_mesh_is_refused(check_change):
    expected = """\
error[T045]: a pinning names mesh 2, which does not exist
  --> mgd.textproto:19:46
   |
19 | pinnings { logical_fabric_node_id { mesh_id: 2 chip_id: 1 } physical_asic_position { tray_id: 1 asic_location: 1 } }
   |                                              ^ no mesh has id 2
"""
    check_change(
        "top_level_instance",
        "pinnings { logical_fabric_node_id { mesh_id: 2 chip_id: 1 } physical_asic_position { tray_id: 1 asic_location: 1 } }\ntop_level_instance",
        expected,
    )


def test_a_pinning_with_number_and_pattern_is_refused(check_change):
    expected = """\
error[T005]: a pinning has both of `mesh_id` and `mesh_id_regex`; one of them was expected
  --> mgd.textproto:19:63
   |
19 | pinnings { logical_fabric_node_id { mesh_id: 0 mesh_id_regex: "0-1" chip_id: 1 } physical_asic_position { tray_id: 1 asic_location: 1 } }
   |                                                               ^^^^^
"""
    check_change(
        "top_level_instance",
        'pinnings { logical_fabric_node_id { mesh_id: 0 mesh_id_regex: "0-1" chip_id: 1 } physical_asic_position { tray_id: 1 asic_location: 1 } }\ntop_level_instance',
        expected,
    )


def test_a_mesh_without_links_is_a_warning(check_change):
    expected = """\
warning[T040]: no link leads from mesh 0 to mesh 2
  --> mgd.textproto:13:53
   |
13 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 2 } }
   |                                                     ^ not connected
  --> mgd.textproto:11:53
   |
11 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
   |                                                     -

warning[T022]: no rank drives mesh 2
  --> mgd.textproto:13:53
   |
13 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 2 } }
   |                                                     ^ idle
  --> rank_bindings.yaml:1:1
   |
 1 | rank_bindings:
   | ------------- these bind 2 ranks
"""
    check_change("  connections", '  instances { mesh { mesh_descriptor: "M0" mesh_id: 2 } }\n  connections', expected)


def test_a_file_of_comments_is_refused(check_change):
    expected = """\
error[T002]: mgd.textproto holds nothing but comments
"""
    check_change(GOOD, "# nothing\n", expected)


def test_an_unclosed_group_is_marked(check_change):
    expected = """\
error[T008]: mgd.textproto is not text format: a group that line 1 opens is never closed
 --> mgd.textproto:1:18
  |
1 | mesh_descriptors {
  |                  ^ needs `}`
"""
    check_change("channels { count: 2 }\n}\ng", "channels { count: 2 \n}\ng", expected)


def test_an_unclosed_list_is_marked(check_change):
    expected = """\
error[T008]: mgd.textproto is not text format: a list is not closed, or a comma is missing after an item
 --> mgd.textproto:4:33
  |
4 |   device_topology { dims: [1, 8 }
  |                                 ^ expected `,` or `]`
"""
    check_change("[1, 8]", "[1, 8", expected)


def test_an_unclosed_string_is_marked(check_change):
    expected = """\
error[T008]: mgd.textproto is not text format: a quote is never closed
  --> mgd.textproto:10:9
   |
10 |   type: "FABRIC
   |         ^ opened here; a string ends on its line
"""
    check_change('"FABRIC"', '"FABRIC', expected)


def test_an_equals_sign_is_marked(check_change):
    expected = """\
error[T008]: mgd.textproto is not text format: `count` has no colon and no braces after it
 --> mgd.textproto:6:14
  |
6 |   channels { count = 2 }
  |              ^^^^^ expected `count: …` or `count { … }`
"""
    check_change("count: 2", "count = 2", expected)


def test_a_comment_of_another_language_is_marked(check_change):
    expected = """\
error[T008]: mgd.textproto is not text format: `//` begins no comment
 --> mgd.textproto:1:1
  |
1 | // meshes
  | ^^

hint: a comment begins with `#`
"""
    check_change("mesh_descriptors", "// meshes\nmesh_descriptors", expected)


def test_a_closing_brace_too_many_is_marked(check_change):
    expected = """\
error[T008]: mgd.textproto is not text format: `}` closes nothing
  --> mgd.textproto:19:1
   |
19 | }
   | ^ nothing is open here
"""
    check_change("top_level", "}\ntop_level", expected)


def test_an_unknown_escape_is_marked(check_change):
    expected = """\
error[T008]: mgd.textproto is not text format: `\\R` means nothing in a string
  --> mgd.textproto:10:13
   |
10 |   type: "FAB\\RIC"
   |             ^^

hint: write `\\\\` for a backslash
"""
    check_change('"FABRIC"', '"FAB\\RIC"', expected)


def test_a_field_of_another_message_is_marked(check_change):
    expected = """\
error[T004]: unknown key `tray_id` in a reference to a mesh
  --> mgd.textproto:12:55
   |
12 |   instances { mesh { mesh_descriptor: "M0" mesh_id: 1 tray_id: 1 } }
   |                                                       ^^^^^^^ expected `device_id`

hint: `tray_id` belongs in `pinnings.physical_asic_position`
"""
    check_change("mesh_id: 1 }", "mesh_id: 1 tray_id: 1 }", expected)
