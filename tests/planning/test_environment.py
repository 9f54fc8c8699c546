"""What each rank finds in its environment: later sources win, and managed names never come from a shell."""

from pathlib import Path

import pytest

from ttlaunch.agent.shim import rank_environment
from ttlaunch.spec.topology.variables import KNOWN_VARIABLES, MANAGED

BINDINGS = """\
rank_bindings:
  - {rank: 0, mesh_id: 1, env_overrides: {TT_LEVEL: rank, TT_VISIBLE_DEVICES: "0,1"}}
  - {rank: 1, mesh_id: 0}
global_env: {TT_LEVEL: global, TT_METAL_HOME: /opt/tt-metal, FREE: global}
mesh_graph_desc_path: mgd.yaml
"""
DESCRIPTOR = (Path(__file__).parents[2] / "configurations/2loudboxes/mgd.yaml").read_text()
SHELL = {
    "HOME": "/home/ann",
    "USER": "ann",
    "PATH": "/usr/bin",
    "VIRTUAL_ENV": "/opt/venv",
    "TT_LEVEL": "shell",
    "TT_METAL_HOME": "/shell/tt-metal",
    "TTNN_CONFIG": "x",
    "ARCH_NAME": "wormhole_b0",
    "WH_ARCH_YAML": "y",
    "RELIABILITY_MODE": "relaxed",
    "DEEPSEEK_V3": "z",
    "MESH_DEVICE": "N300",
    "SECRET_TOKEN": "hush",
}


@pytest.fixture
def environments(plan, here):
    """`environments(shell=…)`: what the two ranks of a cluster see on a host that has only `inherited`."""
    (here / "lab").mkdir()
    (here / "lab/hosts.txt").write_text("a slots=1\nb slots=1\n")
    (here / "lab/mgd.yaml").write_text(DESCRIPTOR)

    def make(*, shell=SHELL, inherited=None, bindings=BINDINGS, env=()):
        (here / "lab/rank_bindings.yaml").write_text(bindings)
        content = plan("fabric_minimal", on="lab", surroundings={"shell": shell}, shell=shell, env=env).as_json()
        return [
            rank_environment(content, row, inherited or {}, run_folder="RUN", plan_path="PLAN")
            for row in content["ranks"]
        ]

    return make


def test_variables_of_the_vendor_are_passed_on_and_others_are_not(environments):
    first, _ = environments()
    passed = {name: first[name] for name in SHELL if name in first and not name.startswith("TT_")}
    assert passed == {name: SHELL[name] for name in SHELL if not name.startswith("TT_") and name != "SECRET_TOKEN"}
    assert "SECRET_TOKEN" not in first


def test_the_rank_beats_the_bindings_which_beat_the_shell(environments):
    first, second = environments()
    assert (first["TT_LEVEL"], second["TT_LEVEL"]) == ("rank", "global")
    assert first["TT_METAL_HOME"] == "/opt/tt-metal"


def test_a_managed_name_that_the_bindings_set_is_theirs(environments):
    first, second = environments(bindings=BINDINGS.replace("FREE: global", "TT_MESH_HOST_RANK: '3', TT_RUN_RANK: '7'"))
    assert (first["TT_RUN_RANK"], second["TT_RUN_RANK"]) == ("7", "7")
    assert (first["TT_MESH_HOST_RANK"], first["TTLAUNCH_RANK"], second["TTLAUNCH_RANK"]) == ("3", "0", "1")


def test_env_on_the_command_line_beats_every_file_for_all_ranks(environments):
    first, second = environments(env=("TT_LEVEL=typed", "OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2", "EMPTY=", "EQ=a=$b"))
    typed = {"TT_LEVEL": "typed", "OMP_NUM_THREADS": "2", "EMPTY": "", "EQ": "a=$b"}
    assert [typed, typed] == [{name: rank[name] for name in typed} for rank in (first, second)]


def test_env_without_a_value_takes_that_of_the_shell(environments):
    first, second = environments(env=("ARCH_NAME", "UNKNOWN=env:HOME"), inherited=SHELL)
    assert [("wormhole_b0", "/home/ann")] * 2 == [(rank["ARCH_NAME"], rank["UNKNOWN"]) for rank in (first, second)]


@pytest.mark.parametrize("name", sorted(MANAGED))
def test_a_managed_name_never_comes_from_a_shell_or_a_host(environments, name):
    own = environments()
    left_over = environments(shell={**SHELL, name: "left over"}, inherited={name: "left over"})
    assert own == left_over


def test_what_one_rank_gets_does_not_reach_the_next(environments):
    first, second = environments()
    assert first["TT_VISIBLE_DEVICES"] == "0,1"
    assert "TT_VISIBLE_DEVICES" not in second
    assert (first["TT_MESH_ID"], second["TT_MESH_ID"]) == ("1", "0")
    assert (first["TT_RUN_RANK"], second["TT_RUN_RANK"]) == ("0", "1")


def test_defaults_follow_the_launch_folder(environments, here):
    first, _ = environments(shell={}, bindings=BINDINGS.replace("TT_METAL_HOME: /opt/tt-metal, ", ""))
    folder = "/home/ann/project"
    expected = {
        "TT_METAL_HOME": folder,
        "TT_METAL_RUNTIME_ROOT": folder,
        "PYTHONPATH": folder,
        "LD_LIBRARY_PATH": f"{folder}/build/lib",
        "TT_RUN_ORIGINAL_CWD": folder,
        "TT_MESH_GRAPH_DESC_PATH": str(here / "lab/mgd.yaml"),
    }
    assert {name: first.get(name) for name in expected} == expected


def test_the_shell_decides_where_it_says_something(environments):
    shell = {"PYTHONPATH": "/p", "LD_LIBRARY_PATH": "/l", "TT_METAL_RUNTIME_ROOT": "/r"}
    first, _ = environments(shell=shell)
    assert [first[name] for name in shell] == ["/p", "/l", "/r"]


def test_the_runtime_root_follows_the_metal_home_of_the_shell(environments):
    first, _ = environments(shell={"TT_METAL_HOME": "/shell/tt-metal"})
    assert first["TT_METAL_RUNTIME_ROOT"] == "/shell/tt-metal"


def test_what_a_host_gives_stays_unless_the_plan_says_otherwise(environments):
    first, _ = environments(inherited={"LANG": "C.UTF-8", "TT_LEVEL": "host"})
    assert (first["LANG"], first["TT_LEVEL"]) == ("C.UTF-8", "rank")


def test_the_contract_is_set_on_every_rank(environments):
    first, second = environments(inherited={"TTLAUNCH_RUN_ID": "tonight", "TTLAUNCH_RANK": "9"})
    assert [(e["TTLAUNCH_RANK"], e["TTLAUNCH_HOST"], e["TTLAUNCH_RUN_ID"]) for e in (first, second)] == [
        ("0", "a", "tonight"),
        ("1", "b", "tonight"),
    ]


def test_a_rank_of_a_mesh_with_several_hosts_is_told_which_it_is(environments):
    bindings = BINDINGS.replace("{rank: 1, mesh_id: 0}", "{rank: 1, mesh_id: 0, mesh_host_rank: 0}")
    first, second = environments(bindings=bindings)
    assert (first.get("TT_MESH_HOST_RANK"), second.get("TT_MESH_HOST_RANK")) == (None, "0")


def test_the_home_of_python_is_passed_on_if_it_is_set(environments):
    assert environments(shell={"PYTHONHOME": "/opt/python"})[0]["PYTHONHOME"] == "/opt/python"
    assert "PYTHONHOME" not in environments(shell={})[0]


def test_overrides_of_a_rank_beat_what_is_managed_but_not_the_contract(environments):
    own = 'TT_MESH_ID: "7", TT_RUN_ORIGINAL_CWD: /x, TTLAUNCH_RANK: "5"'
    first, second = environments(bindings=BINDINGS.replace("TT_LEVEL: rank", own))
    assert (first["TT_MESH_ID"], first["TT_RUN_ORIGINAL_CWD"], first["TTLAUNCH_RANK"]) == ("7", "/x", "0")
    assert (second["TT_MESH_ID"], second["TT_RUN_ORIGINAL_CWD"]) == ("0", "/home/ann/project")


def test_global_variables_beat_what_is_managed_for_all_ranks(environments):
    bindings = BINDINGS.replace("FREE: global", "PYTHONPATH: /g, TT_RUN_ORIGINAL_CWD: /g, HOME: /g")
    first, _ = environments(bindings=bindings)
    assert [first[name] for name in ("PYTHONPATH", "TT_RUN_ORIGINAL_CWD", "HOME")] == ["/g", "/g", "/g"]


def test_every_managed_name_is_one_that_a_misspelling_is_compared_with():
    assert set() == MANAGED - KNOWN_VARIABLES
