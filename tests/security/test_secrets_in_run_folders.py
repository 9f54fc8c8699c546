"""Secrets that a user gives a run: the ranks get them, and nothing that the run leaves behind or prints holds them."""

import json
import os
import subprocess
import sys

import pytest

from ttlaunch.cli.run import _without_secrets

pytestmark = pytest.mark.mpi

CANARY = "canary"
VARIABLES = {
    "PGPASSWORD": "{}",
    "MYSQL_PWD": "{}",
    "DATABASE_URL": "postgres://ann:{}@db:5432/x",
    "HTTPS_PROXY": "http://ann:{}@proxy:3128",
    "GH_PAT": "{}",
    "AUTHORIZATION": "Bearer {}",
    "COOKIE": "session={}",
    "SIGNING_KEY_B64": "{}",
    "PLAIN_LOOKING": "-----BEGIN PRIVATE KEY-----{}",
    "WEBHOOK": "https://hooks/x?token={}",
}
"""Variables of `cluster.yaml`, each with a value of its own."""
ARGUMENTS = ["--password", "{}", "--api-key={}", "DB_PASSWORD={}", "postgres://ann:{}@db/x", "--lr", "3"]

PROGRAM = """
import json, os, sys
print("got", len([name for name in os.environ if "canary" in os.environ[name]]), len([w for w in sys.argv if "canary" in w]))
json.dump([dict(os.environ), sys.argv[1:]], open("seen.json", "w"))
sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""


@pytest.fixture
def planted(here):
    """`planted(line, ends_with=0)`: a run with a secret in each place; returns its output and the secrets that ranks must see."""

    def numbered(templates, start):
        return [template.format(f"{CANARY}{start + n}") for n, template in enumerate(templates)]

    values = dict(zip(VARIABLES, numbered(VARIABLES.values(), 100), strict=True))
    words = numbered(ARGUMENTS, 200)
    (here / "lab").mkdir()
    (here / "lab/hosts.txt").write_text("localhost slots=1\n")
    (here / "lab/cluster.yaml").write_text(f"environment: {json.dumps(values)}\n")
    (here / "work.py").write_text(PROGRAM)

    def run(*options, ends_with=0):
        environment = os.environ | {"TT_API_TOKEN": f"{CANARY}300", "TT_METAL_URL": f"http://a:{CANARY}301@b"}
        environment |= {"MESH_ENDS_WITH": "", "XDG_STATE_HOME": str(here / "state"), "ENDS_WITH": str(ends_with)}
        command = [sys.executable, "-m", "ttlaunch", "run", "--on", "lab", *options, "work.py", "--", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    return run, values, words


def ours(command, here):
    answer = subprocess.run(
        [sys.executable, "-m", "ttlaunch", *command], capture_output=True, text=True, timeout=120, check=False, cwd=here
    )
    return answer.stdout + answer.stderr


@pytest.mark.parametrize("ends_with", [0, 3])
@pytest.mark.core
def test_ranks_get_secrets_that_nothing_keeps(planted, here, ends_with):
    run, values, words = planted
    answer = run(ends_with=ends_with)
    assert (1 if ends_with else 0) == answer.returncode, answer.stderr
    seen, arguments = json.loads((here / "seen.json").read_text())
    assert words == arguments
    assert values == {name: seen[name] for name in values}
    assert f"{CANARY}300" == seen["TT_API_TOKEN"]
    (here / "seen.json").unlink()

    kept = {
        path: path.read_bytes() for folder in ("runs", "state") for path in (here / folder).rglob("*") if path.is_file()
    }
    assert {"plan.json", "report.json", "command.sh", "environment.json", "runs.sqlite"} <= {path.name for path in kept}
    kept = {
        path: content for path, content in kept.items() if content != PROGRAM.encode()
    }  # which says the word itself
    assert [] == [path for path, content in kept.items() if CANARY.encode() in content]

    commands = ("report latest --format json", "report latest", "logs latest", "ps --all", "plan work.py --on lab")
    shown = [answer.stdout + answer.stderr, *(ours(command.split(), here) for command in commands)]
    shown.append(ours(["plan", "work.py", "--on", "lab", "--format", "json", "--", *words], here))
    assert [] == [text for text in shown if CANARY in text]


SNOOP = """
import os, pathlib
lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
print("got", os.environ["HF_TOKEN"] == "canary" + "1", os.environ["DB"].endswith("@b"), os.environ["PLAIN"])
print("shown", sum(b"canary1" in line for line in lines))
"""


def test_a_variable_of_the_command_line_reaches_ranks_and_its_secret_stays_out_of_files_and_process_lists(here):
    (here / "snoop.py").write_text(SNOOP)
    line = "run snoop.py --env HF_TOKEN --env=DB=postgres://a:canary2@b --env PLAIN=7"
    environment = os.environ | {"HF_TOKEN": f"{CANARY}1", "XDG_STATE_HOME": str(here / "state")}
    command = [sys.executable, "-m", "ttlaunch", *line.split()]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert 0 == answer.returncode, answer.stderr
    assert "got True True 7" in answer.stdout
    assert "shown 0" in answer.stdout
    assert CANARY not in answer.stdout + answer.stderr
    kept = [path for folder in ("runs", "state") for path in (here / folder).rglob("*") if path.is_file()]
    assert len(kept) > 3
    contents = {path: path.read_bytes() for path in kept}
    assert [] == [
        path for path, content in contents.items() if CANARY.encode() in content and content != SNOOP.encode()
    ]


def test_the_command_to_resume_leaves_the_value_of_a_secret_variable_to_the_shell():
    words = [
        "run",
        "--env",
        "HF_TOKEN=X",
        "--env=DB=postgres://a:X@b",
        "--env",
        "PLAIN=7",
        "--",
        "x",
        "--env",
        "A_KEY=X",
    ]
    expected = ["run", "--env", "HF_TOKEN", "--env=DB", "--env", "PLAIN=7", "--", "x", "--env", "A_KEY=***"]
    assert expected == _without_secrets(words)


def test_a_run_with_secret_arguments_is_not_repeated_with_wrong_ones(planted, here):
    planted[0]()
    (here / "seen.json").unlink()
    assert "no run keeps the value of its secret argument `env:TTLAUNCH_SECRET_" in ours(["repro"], here)
    assert not (here / "seen.json").exists()
