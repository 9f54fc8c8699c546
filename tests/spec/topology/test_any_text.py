"""Whatever the files hold, loading answers with diagnostics that can be drawn, and never raises."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from ttlaunch.diagnostics import Source, has_errors, render, render_json
from ttlaunch.spec.topology.load import is_textproto, load_topology
from ttlaunch.spec.topology.mgd_textproto import parse_mesh_graph_textproto

HOSTS = "loudbox-01 slots=1\nloudbox-02 slots=1\n"
DESCRIPTOR = """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [{name: lbox, type: Mesh, topology: [1, 8]}]
Mesh: [
  {id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
  {id: 1, board: lbox, device_topology: [1, 8], host_topology: [1, 1]},
]
RelaxedGraph: [[M0, M1, 2]]
"""
BINDINGS = """\
rank_bindings:
  - {rank: 0, mesh_id: 0, env_overrides: {TT_VISIBLE_DEVICES: "0,1"}}
  - {rank: 1, mesh_id: 1}
global_env: {A: "$HOME"}
mesh_graph_desc_path: mgd.yaml
"""
TEXTPROTO = """\
mesh_descriptors {
  name: "M0" arch: CPU device_topology { dims: [1, 8] } host_topology { dims: [1, 1] } channels { count: 2 }
}
graph_descriptors {
  name: "G0" type: "FABRIC"
  instances { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
  instances { mesh { mesh_descriptor: "M0" mesh_id: 1 } }
  connections {
    nodes { mesh { mesh_descriptor: "M0" mesh_id: 0 } }
    nodes { mesh { mesh_descriptor: "M0" mesh_id: 1 device_id: 3 } }
    channels { count: 2 }
  }
}
top_level_instance { graph { graph_descriptor: "G0" } }
"""
SCRAPS = st.sampled_from(
    ["", "[", "]", "{", "}", ":", ",", '"', "'", "\t", "\n", "0", "-1", "x", "&a ", "*a ", "<<", "null", "[]", "{}",
     "!!set ", "---\n", "\x00", "\x1b", "\u2028", "é", "=", "#", "$", "${", "1e999", ".nan", "99999999999999999999"]
)  # fmt: skip


@st.composite
def mangled(draw, text):
    """The text with a few stretches of it replaced by scraps."""
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 12)))
        text = text[:start] + draw(SCRAPS) + text[end:]
    return text


@settings(max_examples=examples(300), deadline=None)
@given(mangled(HOSTS), mangled(DESCRIPTOR), mangled(BINDINGS), mangled("user: joe\nport: 22\n"))
def test_mangled_files_give_diagnostics_and_no_traceback(hosts, descriptor, bindings, cluster):
    with TemporaryDirectory() as name:
        folder = Path(name)
        texts = {"hosts.txt": hosts, "mgd.yaml": descriptor, "rank_bindings.yaml": bindings, "cluster.yaml": cluster}
        for file, text in texts.items():
            (folder / file).write_bytes(text.encode())
        loaded = load_topology(folder, name="lab", environment={"HOME": "/"}, working_folder=folder)
        assert has_errors(loaded.diagnostics) == (loaded.topology is None)
        assert all(line.isprintable() for line in render(loaded.diagnostics).splitlines())
        render_json(loaded.diagnostics)


@settings(max_examples=examples(300), deadline=None)
@given(mangled(TEXTPROTO))
def test_a_mangled_descriptor_of_version_2_gives_diagnostics_and_no_traceback(text):
    read, found = parse_mesh_graph_textproto(Source("mgd.textproto", text))
    assert read is not None or has_errors(found)
    assert all(line.isprintable() for line in render(found).splitlines())
    render_json(found)


def test_a_million_empty_lines_do_not_stall():
    assert not is_textproto(Source("mgd.yaml", "\n" * 1_000_000 + "a: 1"))
