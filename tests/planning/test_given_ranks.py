"""`--ranks` sets the recipe's own number where only one value of one key gives that many ranks, and the plan says so."""

import json

import pytest

from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.spec.recipe.config import render_resolved

WORKERS = "multihost_config.num_workers"
BLOCKS = "multihost_config.pipeline_parallel_config.blocks_per_rank"


@pytest.mark.parametrize(
    ("command", "roles", "sets"),
    [
        ("data_parallel -n 3", ["worker"] * 3, f"{WORKERS}=3"),
        ("data_parallel -n 8", ["worker"] * 8, f"{WORKERS}=8"),
        ("data_parallel -n 3 --naive", ["worker"] * 3, f"{WORKERS}=3"),
        ("elastic_dp -n 4", ["worker"] * 3 + ["server"], f"{WORKERS}=3"),
        ("sync_ps -n 5 --set sync_ps_config.num_servers=2", ["worker"] * 3 + ["server"] * 2, f"{WORKERS}=3"),
        ("pipeline_parallel -n 3", ["stage"] * 3, f"{BLOCKS}=[2, 1, 1]"),
    ],
)
def test_one_layout_and_one_number_that_fit_are_taken(ttlaunch, command, roles, sets):
    answer = ttlaunch(f"plan {command} --format json")
    assert 0 == answer.status, answer.stderr
    plan = json.loads(answer.stdout)
    assert roles == [row["role"] for row in plan["ranks"]]
    assert plan["remarks"][0].startswith(f"`--ranks {len(roles)}` sets `{sets}` in place of the value in ")
    assert f"note  `--ranks {len(roles)}` sets `{sets}`" in ttlaunch(f"plan {command}").stdout


def test_the_plan_is_the_same_as_with_the_key_itself(ttlaunch):
    given = json.loads(ttlaunch("plan data_parallel -n 3 --format json").stdout)
    typed = json.loads(ttlaunch(f"plan data_parallel --set {WORKERS}=3 --format json").stdout)
    assert (given["hash"], 3) == (typed["hash"], given["config"]["multihost_config"]["num_workers"])
    assert [] == typed["remarks"]


@pytest.mark.parametrize(
    "command", ["data_parallel -n 2", "data_parallel -n 1", "hierarchical_parallel -n 3", "fabric_minimal -n 5"]
)
def test_nothing_is_set_where_a_layout_fits_as_it_is(ttlaunch, command):
    assert "note  `--ranks" not in ttlaunch(f"plan {command}").stdout


@pytest.mark.parametrize(
    ("command", "hints"),
    [
        ("hierarchical_parallel -n 6", [f"{WORKERS}=5", f"{WORKERS}=4"]),
        ("sync_ps -n 4", [f"{WORKERS}=3", "sync_ps_config.num_servers=2"]),
        ("tensor_parallel -n 4", ["tensor_parallel_config.replicas=2", "tensor_parallel_config.ranks=4"]),
        ("data_parallel -n 3 --set multihost_config.num_workers=2", [f"{WORKERS}=3"]),
    ],
)
def test_several_numbers_or_none_are_refused_with_all_that_fit(ttlaunch, command, hints):
    answer = ttlaunch(f"plan {command}")
    assert 3 == answer.status
    assert "error[P003]" in answer.stderr
    assert hints == [
        line.split("`")[1].removeprefix("--set ") for line in answer.stderr.splitlines() if "makes layout" in line
    ]


def test_more_ranks_than_slots_are_no_fault_of_the_recipe(ttlaunch, tmp_path):
    (tmp_path / "hosts.txt").write_text("a slots=2\nb slots=2\n")
    answer = ttlaunch(f"plan data_parallel --hostfile {tmp_path}/hosts.txt -n 5")
    assert (3, True) == (
        answer.status,
        "error[P002]: `--ranks 5` was given but the hosts offer 4 slots" in answer.stderr,
    )


def test_of_a_number_that_a_rule_forbids_the_rule_says_why(ttlaunch):
    answer = ttlaunch("plan data_parallel -n 9")
    assert (3, True) == (answer.status, "error[C011]: 9 workers share 8 micro-batches" in answer.stderr)
    assert "--> --ranks:1:" in answer.stderr


def test_every_hint_about_a_number_of_ranks_can_be_typed_as_it_stands(ttlaunch):
    answer = ttlaunch("plan pipeline_parallel -n 4")
    hints = [line.split("`")[1] for line in answer.stderr.splitlines() if "makes layout" in line]
    assert 3 == len(hints)
    assert [0, 0, 0] == [ttlaunch(f"plan pipeline_parallel -n 4 {hint}").status for hint in hints]


def test_the_resolved_file_says_that_ranks_set_the_number(here):
    choice = resolve(RunSpec("data_parallel", ranks=3), working_folder=here).choice
    assert "  num_workers: 3  # --ranks" in render_resolved(choice.recipe, choice.loaded).splitlines()


def test_the_plan_says_which_keys_the_naive_form_does_not_use(ttlaunch):
    answer = ttlaunch("plan data_parallel --naive --set checkpoint_config.interval=5")
    (note,) = [line for line in answer.stdout.splitlines() if line.startswith("note  ")]
    assert "`checkpoint_config.interval=5` (--set) and `training_config.validation_interval=50` (" in note
    assert note.endswith(" without effect")
