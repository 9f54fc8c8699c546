"""Runs whose plan does not say yet what their engine calls things: everything that reads a run still reads them."""

import json
import os
import subprocess
import sys

import pytest

from ttlaunch import contract
from ttlaunch.running.runs.facts import read_daemons

pytestmark = pytest.mark.mpi

CONFIG = """\
training_config: {{steps: {steps}, batch_size: 2, micro_batch_size: 1, validation_sequences: 2, validation_interval: 2}}
transformer_config: {{num_blocks: 1, num_heads: 2, embedding_dim: 16, max_sequence_length: 16}}
checkpoint_config: {{interval: 2}}
"""


def ttlaunch(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "ttlaunch", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )


def train(folder, *words, steps):
    (folder / "train.yaml").write_text(CONFIG.format(steps=steps))
    command = ("run", "hierarchical_parallel", "--ranks", "1", "-c", "train.yaml", "--format", "json")
    answer = ttlaunch(folder, *command, *words)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.fixture(scope="module")
def old_run(tmp_path_factory):
    """A folder with one run, as the last version left it."""
    folder = tmp_path_factory.mktemp("old")
    train(folder, steps=4)
    [run] = [path for path in folder.glob("runs/[!.]*") if path.is_dir()]
    path = run / contract.PLAN_FILE
    plan = json.loads(path.read_text())
    assert plan["engine"].pop("names")["rank_variables"]
    path.write_text(json.dumps(plan))
    return folder, run


@pytest.mark.parametrize("command", [("report", "latest"), ("attach", "latest"), ("ps", "--all"), ("logs", "latest")])
def test_such_a_run_can_be_looked_at(old_run, command):
    folder, run = old_run
    answer = ttlaunch(folder, *command)
    assert (answer.returncode, answer.stderr) == (0, "")
    if command[0] in {"report", "ps"}:
        assert "hierarchical_parallel" in answer.stdout
    assert read_daemons(run) == ()


def test_training_goes_on_from_such_a_run(old_run):
    folder, run = old_run
    report = train(folder, "--resume", run.name, steps=6)
    assert (report["steps"], report["began_from"]["step"]) == (6, 4)


def test_a_shim_refuses_such_a_plan_and_says_why(old_run):
    _, run = old_run
    shim = subprocess.run(["sh", run / "command.sh"], capture_output=True, text=True, timeout=60, check=False)
    assert shim.returncode == 70
    assert "ttlaunch shim: the plan does not say how its engine names ranks; another version wrote it" in shim.stderr
