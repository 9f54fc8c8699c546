"""The page for users of other projects: each command is accepted, and their files do what the page says."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from ttlaunch.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", TEXT.replace(r"\|", "¦"), re.MULTILINE)
COMMANDS = sorted(
    {command.partition(" ¦ ")[0] for _, here in ROWS for command in re.findall(r"`(ttlaunch [^`]+)`", here)}
)
PLANNED = [one for one in COMMANDS if one.startswith("ttlaunch run ") and not re.search(r"--resume|…", one)]
NOT_OF_A_PLAN = re.compile(r" --(sink|profile-steps|lease) \S+")
TWO_LOUDBOXES = {
    "hosts.txt": "metal-wh-01 slots=1\nmetal-wh-04 slots=1\n",
    "mgd.yaml": """\
ChipSpec: {
  arch: wormhole_b0,
  ethernet_ports: {
    N: 2, E: 2, S: 2, W: 2,
  }
}

Board: [
  { name: lbox, type: Mesh, topology: [1, 8]}
]

Mesh: [
  {
    id: 0,
    board: lbox,
    device_topology: [1, 8],
    host_topology: [1, 1],
  },
  {
    id: 1,
    board: lbox,
    device_topology: [1, 8],
    host_topology: [1, 1],
  }
]

RelaxedGraph: [
  [M0, M1, 2],
]
""",
    "rank_bindings.yaml": """\
rank_bindings:
  - rank: 0
    mesh_id: 1
  - rank: 1
    mesh_id: 0

global_env:
  TT_METAL_HOME: "/home/ttuser/git/tt-metal"
mesh_graph_desc_path: "configurations/2loudboxes/mgd.yaml"
""",
}
"""The files of the multi-host examples, as their document prints them."""


@pytest.fixture
def three_tier(here):
    """The three-tier training's file as the page shows it, which is as its document shows it."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (here / "three_tier.yaml").write_text(text)


def plan(ttlaunch, *words):
    return ttlaunch(["plan", *words, "--format", "json"])


@pytest.mark.parametrize("command", PLANNED)
def test_a_command_for_a_training_of_another_project_makes_a_plan(ttlaunch, command):
    if "my_setup" in command:
        assert 0 == ttlaunch("init my_setup --hosts hostname1,hostname2").status
    answer = ttlaunch(shlex.split(NOT_OF_A_PLAN.sub("", command).replace("ttlaunch run", "plan", 1)))
    assert (0, "") == (answer.status, answer.stderr)


@pytest.mark.parametrize(
    "command", [one for one in COMMANDS if one not in {*PLANNED, "ttlaunch run"} and "…" not in one]
)
def test_every_other_command_has_the_options_of_the_page(command):
    words, group = shlex.split(command)[1:], get_command(app)
    context = typer.Context(group)
    while hasattr(group, "commands"):
        group, words = group.get_command(context, words[0]), words[1:]
    assert group.make_context(command, words).params


def test_there_are_commands_for_every_project():
    assert len(PLANNED) >= 20
    assert len(COMMANDS) - len(PLANNED) >= 10


def test_the_files_of_the_multi_host_examples_are_taken_unchanged(ttlaunch, here):
    folder = here / "configurations" / "2loudboxes"
    folder.mkdir(parents=True)
    for name, text in TWO_LOUDBOXES.items():
        (folder / name).write_text(text)
    answer = ttlaunch("validate 2loudboxes")
    assert (0, "") == (answer.status, answer.stderr)
    assert answer.stdout.startswith("2loudboxes is consistent: 2 hosts, 2 slots, 2 ranks bound, 2 meshes, 1 link")
    made = json.loads(plan(ttlaunch, "fabric_minimal", "--on", "2loudboxes").stdout)
    assert ["metal-wh-01", "metal-wh-04"] == [row["host"] for row in made["ranks"]]
    assert ["1", "0"] == [row["environment"]["TT_MESH_ID"] for row in made["ranks"]]


def test_the_three_tier_file_as_written_is_refused_and_its_hints_together_give_a_plan(ttlaunch, three_tier):
    line = ["hierarchical_parallel", "-c", "three_tier.yaml"]
    refused = plan(ttlaunch, *line)
    found = json.loads(refused.stdout)["diagnostics"]
    assert (3, ["C011", "P007"]) == (refused.status, [one["code"] for one in found])
    assert "16 workers share 8 micro-batches; each needs at least one" == found[0]["message"]
    assert "2 workers with 8 devices each = 16" in json.dumps(found[0])
    hints = [shlex.split(re.search(r"`([^`]+)`", one["hints"][0])[1]) for one in found]
    accepted = plan(ttlaunch, *line, *(word for hint in hints for word in hint))
    assert 0 == accepted.status
    roles = [row["role"] for row in json.loads(accepted.stdout)["ranks"]]
    assert ["worker"] * 16 + ["aggregator", "optimizer"] == roles
    assert " ".join(f"--set {hint[1]}" for hint in hints) in TEXT


@pytest.mark.parametrize("command", re.findall(r"^ttlaunch (plan .*)$", TEXT, re.MULTILINE))
def test_the_commands_below_the_three_tier_file_give_plans(ttlaunch, three_tier, command):
    answer = ttlaunch(command)
    assert (0, "") == (answer.status, answer.stderr)
