"""Secrets are named in a plan and nowhere written; their values travel beside it."""

import json
import shlex

import pytest

from ttlaunch.agent.shim import rank_environment
from ttlaunch.contract import fill_command
from ttlaunch.planning.secrets import hide_secrets, mask_arguments, references
from ttlaunch.running.runs.run_folder import render_command, write_plan

CANARY = "s3cr3t-canary"


SECRET_NAMES = [
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "db_password",
    "APIKEY",
    "KEY",
    "PGPASSWORD",
    "MYSQL_PWD",
    "GH_PAT",
    "AUTHORIZATION",
    "HTTP_COOKIE",
    "SIGNING_KEY_B64",
    "SERVICE_ACCOUNT_KEY_BASE64",
    "SSHPASS",
    "DB_PASS_2",
    "OPENAI_KEY_PROD",
    "GIT_AUTH",
    "SENTRY_DSN",
    "AZURE_CREDENTIALS_JSON",
    "SECRETS_FOR_ALL",
    "PASSWORD_PROD",
    "apiKey",
    "db.password",
    "client-secret",
    "JWT",
    "DBPASS",
    "DB_PW",
    "LDAP_BINDPW",
    "PASSWORD1",
    "TOKEN2",
    "PASSWORDS",
    "API_KEYS",
    "MINIO_SECRETKEY",
    "HFTOKEN",
    "DOCKER_AUTH_CONFIG",
    "SLACK_WEBHOOK_URL",
    "MNEMONIC",
]
OTHER_NAMES = [
    "TOKENIZER",
    "KEYBOARD",
    "TT_METAL_HOME",
    "MONKEY",
    "SECRETARY",
    "PWD",
    "OLDPWD",
    "PATH",
    "PATTERN",
    "AUTHOR",
    "KEY_FILE",
    "PASSWORD_FILE",
    "AWS_ACCESS_KEY_ID",
    "SECRET_NAME",
    "TOKENS_PER_STEP",
    "MAX_TOKENS",
    "PAD_TOKEN",
    "SORT_KEY",
    "COMPASS",
    "BYPASS",
    "CUDA_VISIBLE_DEVICES",
    "PASSIVE",
    "SSH_KEY_PATH",
    "TOKEN_URL",
    "NUM_TOKENS",
    "KEYS",
    "SEED",
    "NUM_KV_KEYS",
]
SECRET_VALUES = [
    f"postgres://ann:{CANARY}@db/x",
    f"http://:{CANARY}@proxy:3128",
    f"https://store/blob?sv=1&sig={CANARY}",
    f"https://api/v1?access_token={CANARY}",
    f"host=db user=ann password={CANARY}",
    f"Server=db;Pwd={CANARY};",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA",
    "LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQ==",
    "Authorization: Bearer abcdefghijklmnop",
    "ghp_" + "a" * 36,
    "hf_" + "a" * 34,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
    "https://" + "a1" * 12 + "@github.com/x",
    "https://hooks.slack.com/services/T0/B0/xyz",
    f'{{"password": "{CANARY}"}}',
    f"X-Api-Key: {CANARY}",
    "AIza" + "a" * 35,
    "npm_" + "a" * 36,
    "dckr_pat_" + "a" * 27,
    "AGE-SECRET-KEY-1" + "Q" * 58,
]
OTHER_VALUES = [
    "ssh://git@host/x",
    "https://host/x?page=2",
    "http://proxy:3128",
    "/a/b:/c/d",
    "password",
    "bearer of news",
    "a=b",
    "sk-1",
    "hf_model",
    "12:30",
    "https://ann@host/x",
    "sort_key: 3",
    "x-offset: 4",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_variable_whose_name_says_secret_is_hidden(name):
    hidden = hide_secrets({name: CANARY}, [], None, shell={})
    assert hidden.environment == {name: "env:TTLAUNCH_SECRET_0"}
    assert hidden.secrets == {"TTLAUNCH_SECRET_0": CANARY}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_variables_stay(name):
    assert hide_secrets({name: "x"}, [], None, shell={}).environment == {name: "x"}


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_a_value_that_is_a_secret_is_hidden_whatever_its_variable_is_called(value):
    hidden = hide_secrets({"SETTING": value}, [], None, shell={}, command=["a.out", value, f"--where={value}"])
    assert hidden.environment == {"SETTING": "env:TTLAUNCH_SECRET_0"}
    assert hidden.command == ("a.out", "env:TTLAUNCH_SECRET_0", "env:TTLAUNCH_SECRET_1")
    assert fill_command(hidden.command, hidden.secrets) == ["a.out", value, f"--where={value}"]


@pytest.mark.parametrize("value", OTHER_VALUES)
def test_other_values_stay(value):
    hidden = hide_secrets({"SETTING": value}, [], None, shell={}, command=["a.out", value])
    assert (hidden.environment, hidden.command) == ({"SETTING": value}, ("a.out", value))


ARGUMENTS = {
    "--password X": "--password env:TTLAUNCH_SECRET_0",
    "--password=X": "--password=env:TTLAUNCH_SECRET_0",
    "-api-key X --lr 3": "-api-key env:TTLAUNCH_SECRET_0 --lr 3",
    "--apiKey=X": "--apiKey=env:TTLAUNCH_SECRET_0",
    "env PGPASSWORD=X prog": "env PGPASSWORD=env:TTLAUNCH_SECRET_0 prog",
    "+db.password=X ++token=X": "+db.password=env:TTLAUNCH_SECRET_0 ++token=env:TTLAUNCH_SECRET_0",
    "model.api_key=X": "model.api_key=env:TTLAUNCH_SECRET_0",
    "--token --verbose": "--token --verbose",
    "--tokenizer X --password-file X": "--tokenizer X --password-file X",
    "--password": "--password",
    "sh -c 'run --password X --lr 3'": "sh -c env:TTLAUNCH_SECRET_0",
    "sh -c 'PGPASSWORD=X psql'": "sh -c PGPASSWORD=env:TTLAUNCH_SECRET_0",
    "sh -c 'echo X'": "sh -c 'echo X'",
}


@pytest.mark.parametrize("line", ARGUMENTS)
def test_an_argument_after_a_secret_option_is_hidden_and_comes_back_for_the_rank(line):
    words = shlex.split(line)
    hidden = hide_secrets({}, [], None, shell={}, command=words)
    assert shlex.join(hidden.command) == ARGUMENTS[line]
    assert fill_command(hidden.command, hidden.secrets) == words


def test_a_command_line_is_shown_with_stars():
    words = ["run", "--set", "a.api_key=X", "--", "prog", "--password", "X", "http://a:X@b"]
    assert mask_arguments(words) == ["run", "--set", "a.api_key=***", "--", "prog", "--password", "***", "***"]


def test_a_secret_within_an_option_of_assignments_is_starred_too():
    assert ["--env=HF_TOKEN=***", "--env=OMP_NUM_THREADS=1"] == mask_arguments(
        ["--env=HF_TOKEN=X", "--env=OMP_NUM_THREADS=1"]
    )


def test_an_argument_whose_secret_is_not_there_is_refused():
    with pytest.raises(LookupError, match="the value of `--key=env:TTLAUNCH_SECRET_7` in the command did not reach"):
        fill_command(["--key=env:TTLAUNCH_SECRET_7"], {})


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
