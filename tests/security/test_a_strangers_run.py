"""The folder of a run from a stranger: looking at it runs none of its code, and opens no file outside of it."""

import json
import os
import re
import resource
import subprocess
import sys

import pytest

from tests.cli.test_broken_runs import make_run  # noqa: F401 - a fixture
from ttlaunch import contract
from ttlaunch.running.metrics.traffic import Edge
from ttlaunch.running.report import read_report
from ttlaunch.running.runs.registry import find_registry

RECIPE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
COUNTED = {"format": contract.TRAFFIC_FORMAT, "first": 1, "last": 3, "sent": [], "waited": [], "spent": [], "facts": {}}
STEPS = "".join(json.dumps({"kind": "step", "time": 1.0, "step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3))


@pytest.fixture
def stranger(make_run, here, monkeypatch):  # noqa: F811 - the fixture above
    """`stranger(change)`: the folder of a run whose plan names a recipe beside it, and was changed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    evil = here / "evil"
    evil.mkdir()
    (evil / "recipe.py").write_text(RECIPE)

    def make(change=lambda plan: None):
        row = {"rank": 0, "host": "box", "slot": 0, "role": "worker"}
        plan = {
            "recipe": {"name": "evil", "folder": str(evil)},
            "hash": "h",
            "layout": "l",
            "ranks": [row],
            "config": {},
        }
        change(plan)
        files = {contract.PLAN_FILE: plan, contract.traffic_file(0): COUNTED, contract.progress_file(0): STEPS}
        files[contract.traffic_file(0)] = json.dumps(COUNTED) + "\n"
        return make_run("odd", files)

    return make


@pytest.mark.parametrize("line", ["report odd", "report odd --format json", "logs odd", "diff odd odd", "ps --all"])
def test_looking_at_a_run_that_somebody_else_started_runs_no_recipe(ttlaunch, stranger, here, line):
    stranger()
    answer = ttlaunch(line)
    assert 0 == answer.status
    assert not (here / "evil/ran").exists()
    if "report" in line:
        assert "this user has not started it here, so the code of evil is not run" in answer.stdout


def test_the_report_of_an_own_run_asks_its_recipe(ttlaunch, stranger, here):
    run = stranger()
    find_registry({"XDG_STATE_HOME": str(here / "state")}).enter(run, name="evil", plan_hash="h", ranks=1)
    assert 0 == ttlaunch("report odd").status
    assert (here / "evil/ran").exists()


PLANS = {
    "a rank that is a path": lambda plan: plan["ranks"][0].update(rank="../../../../secret"),
    "a rank that is huge": lambda plan: plan["ranks"][0].update(rank=10**12),
    "a host that is a list": lambda plan: plan["ranks"][0].update(host=[1]),
    "a recipe that is a word": lambda plan: plan.update(recipe="x"),
    "ranks that are a word": lambda plan: plan.update(ranks="x"),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_plan_that_no_run_has_is_refused(ttlaunch, stranger, what):
    stranger(PLANS[what])
    for line in ("report odd", "logs odd"):
        answer = ttlaunch(line)
        assert (3, True) == (answer.status, "plan.json is not a plan" in answer.stderr)


@pytest.mark.parametrize("start", ["x", {"step": "x"}, {"step": 10**400}, [1]])
def test_a_start_of_another_type_does_not_end_the_report(ttlaunch, stranger, start):
    stranger(lambda plan: plan.update(start=start))
    assert 0 == ttlaunch("report odd").status


@pytest.mark.parametrize(
    "name", [contract.EVENTS_FILE, contract.progress_file(0), contract.LAUNCHER_FILE, contract.REPORT_FILE]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "nested", "early"])
def test_a_file_of_a_run_that_is_none_neither_blocks_nor_fills_memory(stranger, name, kind):
    run = stranger()
    path = run / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 100_000 + "\n" if kind == "nested" else '{"time": "0001-01-01T00:00:00+14:00"}\n')
    # A reader that blocks or reads for ever would be ended by the clock or by the limit of memory.
    answer = subprocess.run(
        [sys.executable, "-c", READERS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=_limit_memory,
    )
    assert (0, "") == (answer.returncode, "".join(re.findall(".*this is a bug.*", answer.stderr)))
    assert ["ps", "report", "stop", "attach"] == re.findall(r"^read by (\w+)$", answer.stdout, re.MULTILINE), (
        answer.stderr
    )


READERS = """
import sys
from ttlaunch.__main__ import main
for words in (["ps", "--all"], ["report", "odd"], ["stop", "odd"], ["attach", "odd"]):
    sys.argv = ["ttlaunch", *words]
    try:
        main()
    except SystemExit:
        pass
    print(f"\\nread by {words[0]}", flush=True)
"""
"""Every command that reads a run, one after the other in one process: to start four takes longer than what they read."""
ROW = {"rank": 0, "role": "worker", "host": "box"}
REPORT = {"status": "done", "failure": None, "traffic": None, "lost_checkpoints": [], "ranks": [ROW]}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("failure", True),
        ("failure", [1]),
        ("traffic", {"edges": [{}]}),
        ("traffic", "x"),
        ("ranks", 1),
        ("ranks", {"0": ROW}),
        ("ranks", [0]),
        ("ranks", [{**ROW, "last_operation": {}}]),
        ("ranks", [{**ROW, "host": ["box"]}]),
        ("status", None),
        ("last_perplexity", "x"),
        ("duration_s", None),
        ("results", []),
    ],
)
def test_a_report_with_a_part_of_another_type_is_no_report(tmp_path, part, value):
    (tmp_path / contract.REPORT_FILE).write_text(json.dumps({**REPORT, part: value}))
    with pytest.raises(ValueError, match="not a report of this version"):
        read_report(tmp_path)


@pytest.mark.parametrize("row", [{**ROW, "last_operation": {}}, {"rank": 0}, 0])
def test_report_and_attach_refuse_a_report_whose_ranks_are_none(stranger, ttlaunch, row):
    run = stranger()
    (run / contract.REPORT_FILE).write_text(json.dumps({**REPORT, "status": "failed", "ranks": [row]}))
    for line in ("report odd", "attach odd"):
        answer = ttlaunch(line)
        assert answer.status in range(2, 6), (line, answer)
        assert "this is a bug" not in answer.stderr


def test_a_traffic_with_a_text_for_a_number_is_refused():
    known = {
        "operation": "sum",
        "source": 0,
        "dest": 1,
        "messages": 2,
        "bytes": 3,
        "formula_bytes": None,
        "slack_bytes": 0,
    }
    assert Edge.from_json(known).size == 3
    with pytest.raises(TypeError, match="is no number"):
        Edge.from_json({**known, "bytes": "../../etc"})


def _limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
