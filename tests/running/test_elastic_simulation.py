"""A simulated elastic run has the members and the steps of a real one with the same faults."""

import json
import subprocess
import sys

import pytest

from tests.changed_recipes import changed_recipe
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Source
from ttlaunch.lab.virtual import Conditions
from ttlaunch.lab.virtual_elastic import run_elastic_virtually
from ttlaunch.planning.fault_parser import parse_faults
from ttlaunch.running.membership.journal import read_journal
from ttlaunch.running.runs.run_folder import read_events

FAULTS = "join at step=3; kill rank=1 at step=14"
STEPS, LEAF_S, MOST_S = 24, 0.1, 240.0
BLOCK = 3  # micro-batches of 8 that each of three workers computes in a step, one after the other


@pytest.mark.mpi
@pytest.mark.slow
def test_a_simulation_has_the_members_and_steps_of_a_real_run_with_the_same_faults(here):
    """Times of this machine are given to the simulation: how long a worker starts, and how long a micro-batch takes.

    A micro-batch sleeps for most of that, so that other work on the machine changes little; a worker still may be ready a step
    earlier or later.
    """
    changed_recipe(here, "index, x_BT, y_BT = batch", f"__import__('time').sleep({LEAF_S})", indent=8)
    command = [sys.executable, "-m", "ttlaunch", "chaos", "mine/", "-n", "2", "--elastic", "1:3", "--warm"]
    command += ["--set", f"training_config.steps={STEPS}", "--plan", FAULTS, "--format", "json"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=False)
    assert 0 == done.returncode, done.stderr
    [folder] = [path for path in here.glob("runs/[!.]*") if path.is_dir()]
    report = json.loads((folder / "report.json").read_text())
    start_s, leaf_s = measured(folder, report)

    faults, _ = parse_faults(Source("--plan", FAULTS))
    spec = RunSpec("data_parallel", ranks=2, elastic="1:3")
    conditions = Conditions(compute_ms=leaf_s * 1e3, faults=tuple(faults))
    found = run_elastic_virtually(spec, conditions, Unattended(), steps=STEPS, start_s=start_s)

    assert [[0, 1], [0, 1, 2], [0, 2], [0, 2, 3]] == [list(one.epoch.members) for one in found.epochs]
    assert [epoch["members"] for epoch in report["epochs"]] == [list(one.epoch.members) for one in found.epochs]
    real, simulated = ([epoch["step"] for epoch in report["epochs"]], [one.epoch.step for one in found.epochs])
    assert real == pytest.approx(simulated, abs=1), (start_s, leaf_s)
    assert [one["outcome"] for one in json.loads(done.stdout)["faults"]] == [
        str(one.outcome) for one in found.verdict.faults
    ]
    assert (report["status"], STEPS) == (found.verdict.status, sum(one.epoch.steps for one in found.epochs))


def measured(folder, report):
    """How long a worker takes from its start until it registers, and how long one computes for a micro-batch."""
    events = read_events(folder)
    registered = {entry["worker"]: entry["time"] for entry in read_journal(folder) if entry["what"] == "registered"}
    join, kill = (event["time"] for event in events if event["event"] == "fault")
    replaced = next(event["time"] for event in events if event["event"] == "worker_started")
    start_s = (registered[2] - join + registered[3] - replaced) / 2
    second = report["epochs"][1]
    steps = 14 - second["step"]
    return max(0.0, start_s), (kill - second["time"]) / steps / BLOCK
