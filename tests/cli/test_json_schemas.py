"""Every object that `--format json` prints names its schema and the version of it."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import ttlaunch as package
from ttlaunch.cli.console import JSON_SCHEMAS
from ttlaunch.cli.main import app

CLI = Path(package.__file__).parent / "cli"
WITHOUT_A_RUN = {
    "plan data_parallel": "plan",
    "run data_parallel --dry-run": "plan",
    "validate": "validate",
    "validate hosts.txt": "validate",
    "show": "show",
    "place data_parallel --on 2loudboxes": "place",
    "simulate data_parallel --set training_config.steps=1": "simulate",
    "simulate data_parallel --virtual --steps 1": "simulate-virtual",
    "simulate data_parallel --virtual --elastic 1:2 --steps 1": "simulate-virtual-elastic",
    "advise zero --ranks 1": "advise",
    "configs list": "configs",
    "recipes list": "recipes",
    "recipes show zero": "recipe",
    "explain": "explain",
    "explain C001": "explain",
    "init lab --hosts a,b": "init",
    "hosts --from k8s hosts.txt": "hosts",
    "export data_parallel --to mpijob --image i --hosts 2": "export",
    "submit data_parallel --on slurm:gpu --dry-run": "submit",
    "convert configurations/lab2/mgd.yaml mgd.textproto": "convert",
    "data book.txt made.txt": "data",
    "grafana export dashboards": "grafana-export",
    "ps --all": "ps",
    "runs clean --dry-run": "runs-clean",
    "doctor": "doctor",
    "plan nonesuch": "diagnostics",
    "plan data_parallel --nonesuch": "diagnostics",
}
WITH_A_RUN = {
    "report": "report",
    "report --plot": "losses",
    "metrics": "metric-event",
    "metrics --to prometheus=out.prom": "metrics-export",
    "diff latest latest": "diff",
    "weights show latest": "weights",
    "weights diff latest latest": "weights-diff",
    "weights stats latest": "weights-stats",
    "weights export latest w.safetensors": "weights-export",
    "weights export latest model --as hf": "weights-export",
    "weights import model imported.safetensors": "weights-import",
    "replay": "replay",
    "bisect latest latest": "bisect",
    "generate latest a --max-tokens 2": "generate",  # from here on, the newest run is one that answers
    "stop latest": "stop",
    "attach": "run",
    "repro": "run",
    "run data_parallel -d --set training_config.steps=1": "detached",
    "serve latest --port 0 --api-port 0 --detach": "detached",
}
NEEDS_HOSTS_OR_MINUTES = {"chaos", "compare", "join", "parity", "prepare", "sync", "verify", "workers"}
"""Commands that no test here calls, or an elastic run, as `join` and `workers`, which have tests of their own; that they name a schema follows from the only function that prints JSON."""


def printed(answer):
    """The objects that a command has printed: one, or one a line."""
    try:
        return [json.loads(answer.stdout)]
    except ValueError:
        return [json.loads(line) for line in answer.stdout.splitlines()]


def check(ttlaunch, line, name):
    answer = ttlaunch(f"{line} --format json")
    found = printed(answer)
    assert found, answer
    assert {f"ttlaunch.{name}/{JSON_SCHEMAS[name]}"} == {one["schema"] for one in found}
    assert all("schema" == next(iter(one)) for one in found)


@pytest.mark.parametrize("line", WITHOUT_A_RUN)
def test_what_needs_no_run_names_its_schema(ttlaunch, here, line):
    (here / "hosts.txt").write_text("a slots=1\n")
    (here / "book.txt").write_text("words " * 100)
    if line.startswith("convert"):
        ttlaunch("init lab2 --hosts a,b")
    check(ttlaunch, line, WITHOUT_A_RUN[line])


@pytest.fixture
def started(here):
    """`started(line)`: the command in a process of its own, since the supervisor of a run is a child of it."""

    def invoke(line):
        command = [sys.executable, "-m", "ttlaunch", *line.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return invoke


@pytest.mark.mpi
def test_a_run_and_what_reads_it_name_their_schemas(started, ttlaunch, here):
    """What only reads a run is called in this process, which imports it once."""
    (here / "work.py").write_text("print('a line')")
    check(started, "run work.py", "run")
    check(started, "logs", "log-line")
    line = "run data_parallel --set training_config.steps=2 --set checkpoint_config.interval=1"
    check(started, line, "run")
    for command, name in WITH_A_RUN.items():
        only_reads = command.startswith(("report", "metrics", "diff", "weights"))
        check(ttlaunch if only_reads else started, command, name)
    started("stop latest")


def _commands_with_format():
    for name, command in get_command(app).commands.items():
        below = getattr(command, "commands", None)
        for full, one in ((f"{name} {inner}", one) for inner, one in below.items()) if below else [(name, command)]:
            if any(parameter.name == "form" for parameter in one.params):
                yield full


def test_every_command_with_a_format_is_tested_or_known_to_need_more():
    lines = [*WITHOUT_A_RUN, *WITH_A_RUN, "logs"]
    tested = {name for name in _commands_with_format() if any(re.match(rf"{name}( |\Z)", line) for line in lines)}
    assert set(_commands_with_format()) - tested == NEEDS_HOSTS_OR_MINUTES


def _schemas(node):
    """The names of schemas that calls in a module give, as far as they are constants."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            named = [one.value for one in call.keywords if one.arg == "schema"]
            named += call.args[1:2] if getattr(call.func, "id", "") == "with_schema" else []
            yield from (one.value for one in named if isinstance(one, ast.Constant))


def test_every_schema_has_a_version_and_is_printed_by_one_function():
    trees = {path.name: ast.parse(path.read_text()) for path in CLI.glob("*.py")}
    assert set(JSON_SCHEMAS) == {name for tree in trees.values() for name in _schemas(tree)}
    others = {
        name
        for name, tree in trees.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in {"json.dumps", "json.dump"}
    }
    # The first has the function; lines are not indented; a file is no output; JSON Schemas name their own version; the last
    # writes the values of keys.
    assert {"console.py", "logs.py", "metrics.py", "compare.py", "schema.py", "weights.py"} == others
