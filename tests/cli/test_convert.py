"""`ttlaunch convert` on a command line: files, pipes, and what it refuses."""

import pytest
from typer.testing import CliRunner

from ttlaunch.cli.main import app

YAML = """\
ChipSpec: {arch: wormhole_b0, ethernet_ports: {N: 2, E: 2, S: 2, W: 2}}
Board: [{name: lbox, type: Mesh, topology: [1, 8]}]
Mesh: [{id: 0, board: lbox, device_topology: [1, 8], host_topology: [1, 1]}]
RelaxedGraph: []
"""
TEXTPROTO = """\
mesh_descriptors {
  name: "lbox"
  arch: WORMHOLE_B0
  device_topology { dims: [1, 8] }
  host_topology { dims: [1, 1] }
  channels { count: 2 policy: STRICT }
}
top_level_instance { mesh { mesh_descriptor: "lbox" mesh_id: 0 } }
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mgd.yaml").write_text(YAML)

    def invoke(*arguments, stdin=None):
        return CliRunner().invoke(app, ["convert", *arguments], input=stdin)

    return invoke


def test_a_file_is_converted(run, tmp_path):
    result = run("mgd.yaml", "mgd.textproto")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "wrote mgd.textproto\n", "")
    assert (tmp_path / "mgd.textproto").read_text() == TEXTPROTO


def test_a_pipe_is_converted_to_the_other_version(run):
    result = run("-", "-", stdin=YAML)
    assert (result.exit_code, result.stdout, result.stderr) == (0, TEXTPROTO, "")
    assert run("-", "-", stdin=TEXTPROTO).stdout.startswith("ChipSpec:")


def test_a_file_is_not_overwritten_unless_forced(run, tmp_path):
    (tmp_path / "new.textproto").write_text("mine")
    result = run("mgd.yaml", "new.textproto")
    assert (result.exit_code, result.stderr) == (
        2,
        "error[P009]: new.textproto already exists\n\nhint: `--force` overwrites it\n\n",
    )
    assert (tmp_path / "new.textproto").read_text() == "mine"
    assert run("mgd.yaml", "new.textproto", "--force").exit_code == 0
    assert (tmp_path / "new.textproto").read_text() == TEXTPROTO


def test_mistakes_are_shown_and_nothing_is_written(run, tmp_path):
    result = run("-", "new.textproto", stdin=YAML.replace("[1, 8], host", "[1, 9], host"))
    assert result.exit_code == 3
    assert result.stderr.startswith("error[T036]: a mesh has device_topology [1, 9], but its hosts make [1, 8]\n")
    assert not (tmp_path / "new.textproto").exists()


def test_a_missing_file_is_a_mistake(run):
    result = run("nothing.yaml", "-")
    assert result.exit_code == 2
    assert result.stderr.startswith("error[T001]: nothing.yaml does not exist")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("mgd.yaml", "new"),
            "P009]: the name new does not determine which version to write\n\nhint: end it with .yaml or .textproto, or give `--to`",
        ),
        (("mgd.yaml", "a.yaml", "--to", "textproto"), "P009]: `--to textproto` contradicts the name a.yaml"),
        (("mgd.yaml", "-", "--to", "json"), "P009]: `--to json` is not a version; `yaml` or `textproto` was expected"),
        (
            ("mgd.yaml", "missing/a.yaml"),
            "P032]: missing/a.yaml cannot be written: no such file or directory\n\nhint: make its folder first",
        ),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(run, arguments, message):
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (2, f"error[{message}\n\n")


def test_what_is_lost_is_said(run):
    result = run("-", "-", stdin=TEXTPROTO.replace("STRICT", "RELAXED"))
    assert result.stderr == "note: version 1 cannot express that the channels inside a mesh are RELAXED\n"


def test_a_file_of_another_kind_is_one_mistake(run, tmp_path):
    (tmp_path / "bindings.yaml").write_text(
        'rank_bindings:\n  - {rank: 0, mesh_id: 0}\nmesh_graph_desc_path: "mgd.yaml"\n'
    )
    answer = run("bindings.yaml", "out.textproto")
    message = "error[T062]: bindings.yaml is a rank bindings file; a mesh graph descriptor was expected"
    assert (3, 1, True) == (answer.exit_code, answer.stderr.count("error["), answer.stderr.startswith(message))
