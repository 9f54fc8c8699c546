"""Secrets are named in a plan and nowhere written; their values travel beside it."""

import json

import pytest

from ttlaunch.agent.shim import rank_environment
from ttlaunch.planning.secrets import hide_secrets, references
from ttlaunch.running.runs.run_folder import render_command, write_plan

CANARY = "s3cr3t-canary"


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password", "APIKEY", "KEY"])
def test_a_variable_whose_name_says_secret_is_hidden(name):
    hidden = hide_secrets({name: CANARY}, [], None, shell={})
    assert hidden.environment == {name: "env:TTLAUNCH_SECRET_0"}
    assert hidden.secrets == {"TTLAUNCH_SECRET_0": CANARY}


@pytest.mark.parametrize("name", ["TOKENIZER", "KEYBOARD", "TT_METAL_HOME", "MONKEY", "SECRETARY"])
def test_other_variables_stay(name):
    assert hide_secrets({name: "x"}, [], None, shell={}).environment == {name: "x"}


def test_a_secret_of_the_shell_keeps_its_name_so_that_the_command_can_be_repeated():
    hidden = hide_secrets({"TT_TOKEN": CANARY}, [], None, shell={"TT_TOKEN": CANARY})
    assert (hidden.environment, hidden.secrets) == ({"TT_TOKEN": "env:TT_TOKEN"}, {"TT_TOKEN": CANARY})


def test_ranks_with_other_secrets_of_one_name_keep_their_own():
    hidden = hide_secrets({}, [{"A_TOKEN": "1"}, {"A_TOKEN": "2"}, {"A_TOKEN": "1"}], None, shell={})
    values = [hidden.secrets[row["A_TOKEN"].removeprefix("env:")] for row in hidden.rows]
    assert values == ["1", "2", "1"]


def test_references_are_found_at_any_depth_of_a_configuration():
    config = {"a": {"b": ["env:ONE", {"c": "env:TWO"}]}, "d": "env:ONE", "e": "env: no", "f": "environment", "g": 3}
    assert references(config) == ["ONE", "TWO"]


def test_a_rank_gets_the_value_and_the_plan_only_its_name(plan, here):
    (here / "lab").mkdir()
    (here / "lab/hosts.txt").write_text("a slots=2\n")
    (here / "lab/cluster.yaml").write_text(f"environment: {{HF_TOKEN: {CANARY}, PLAIN: env:FROM_SHELL}}\n")
    surroundings = {"shell": {"HOME": "/home/ann", "FROM_SHELL": "value"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROM_SHELL", "value")
        made = plan("fabric_minimal", on="lab", ranks=2, surroundings=surroundings, shell={"FROM_SHELL": "value"})
    assert CANARY not in json.dumps(made.as_json())
    assert CANARY not in repr(made)
    assert CANARY not in render_command(made, here)
    assert all(CANARY.encode() not in path.read_bytes() for path in write_plan(made, here / "written"))
    content = made.as_json()
    seen = rank_environment(content, content["ranks"][0], made.secrets, run_folder="/run", plan_path="/run/plan.json")
    assert (seen["HF_TOKEN"], seen["PLAIN"]) == (CANARY, "value")
    assert not [name for name in seen if name.startswith("TTLAUNCH_SECRET_")]


def test_a_rank_does_not_start_without_the_value_of_its_secret():
    row = {"environment": {"A_TOKEN": "env:GONE"}, "rank": 0, "local_rank": 0, "role": "worker", "host": "a"}
    plan = {"managed": [], "environment": {}, "world_size": 1, "engine": {"names": {"network_variables": []}}}
    with pytest.raises(LookupError, match="the value of `env:GONE` for A_TOKEN did not reach this host"):
        rank_environment(plan, row, {}, run_folder="/run", plan_path="/run/plan.json")
