"""The fixed selection of chaos: each fault breaks a real run, is named rightly and in time, and nothing of it is left."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from ttlaunch.agent.run_processes import run_processes

pytestmark = pytest.mark.mpi

WITHIN_S = 8.0
"""What the run may take from the fault to its end; the hang timeout is part of it."""
WORK = """\
import signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""
TINY = """\
training_config: {steps: 400, batch_size: 4, micro_batch_size: 2, validation_sequences: 4, validation_interval: 1000}
transformer_config: {num_blocks: 1, num_heads: 2, embedding_dim: 16, max_sequence_length: 16}
multihost_config: {num_workers: 2}
checkpoint_config: {interval: 5}
"""


@dataclass(frozen=True)
class Answer:
    status: int
    found: dict[str, Any]
    stderr: str


@pytest.fixture
def chaos(here):
    """`chaos("kill rank=1 at 1s", *arguments)`: the verdict on a run in the empty folder, as JSON."""
    (here / "work.py").write_text(WORK)

    def start(plan, *arguments):
        words = ["chaos", "--plan", plan, "--format", "json", *arguments]
        process = subprocess.Popen(
            [sys.executable, "-m", "ttlaunch", *words],
            cwd=here,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            stdout, stderr = process.communicate()
            pytest.fail(f"`{plan}` did not end:\n{stdout}{stderr}")
        assert stdout, stderr
        return Answer(process.returncode, json.loads(stdout), stderr)

    return start


FAULTS = {
    "kill rank=1 at 1s": ("R004", 1, 1),
    "term rank=1 at 1s": ("R004", 1, 1),
    "stop rank=1 at 1s": ("R013", 1, 6),
    "kill shim=1 at 1s": ("R006", 1, 1),
    "kill mpirun at 1s": ("R008", None, 1),
}


def nothing_left(found):
    assert [] == run_processes(found["run_id"])
    assert [("this machine", [], [], None)] == [
        (one["host"], one["processes"], one["folders"], one["error"]) for one in found["left"]
    ]


@pytest.mark.parametrize("plan", FAULTS)
@pytest.mark.core
def test_a_fault_is_named_in_time_and_leaves_nothing(chaos, plan):
    code, rank, status = FAULTS[plan]
    answer = chaos(plan, "work.py", "-n", "2", "--hang-timeout", "2")
    assert (0, [], plan) == (answer.status, answer.found["diagnostics"], answer.found["plan"]), answer
    (verdict,) = answer.found["faults"]
    assert ("named", True) == (verdict["outcome"], 1.0 <= verdict["at_s"] < 5.0)
    assert 0.0 <= verdict["detected_s"] <= verdict["over_s"] < WITHIN_S
    report = answer.found["report"]
    assert (code, rank, status) == (report["failure"]["code"], report["failure"]["rank"], report["exit_status"])
    nothing_left(answer.found)


def test_ctrl_c_pressed_three_times_ends_ranks_that_ignore_it(chaos):
    plan = "interrupt at 1s; interrupt at 1.5s; interrupt at 2s"
    answer = chaos(plan, "work.py", "-n", "2", "--", "stubborn")
    assert (0, ["named"] * 3) == (answer.status, [fault["outcome"] for fault in answer.found["faults"]]), answer
    assert ("interrupted", 130) == (answer.found["report"]["status"], answer.found["report"]["exit_status"])
    nothing_left(answer.found)


def test_steps_are_waited_for_a_pause_is_endured_what_was_lost_is_said_and_a_simulation_gets_the_same_verdict(
    chaos, here
):
    (here / "train.yaml").write_text(TINY)
    plan = "stop rank=0 at step=3; continue rank=0 at step=3; kill role=optimizer at step=12; kill rank=0 at step=399"
    answer = chaos(plan, "hierarchical_parallel", "-c", "train.yaml")
    assert 0 == answer.status, answer
    outcomes = [fault["outcome"] for fault in answer.found["faults"]]
    assert ["endured", "endured", "named", "not made"] == outcomes
    killed = answer.found["faults"][2]
    assert ([3], True) == (killed["ranks"], killed["step"] >= 12)
    lost = answer.found["lost"]
    assert lost["checkpoint_step"] >= 5
    assert lost["last_step"] - lost["checkpoint_step"] == lost["steps"]
    assert answer.found["run_id"] == lost["resume"]
    nothing_left(answer.found)
    words = ["simulate", "hierarchical_parallel", "-c", "train.yaml", "--virtual", "--plan", plan, "--format", "json"]
    simulated = subprocess.run([sys.executable, "-m", "ttlaunch", *words], cwd=here, capture_output=True, check=True)
    verdict, failure = json.loads(simulated.stdout)["verdict"], answer.found["report"]["failure"]
    assert outcomes == [fault["outcome"] for fault in verdict["faults"]]
    assert (failure["code"], failure["rank"]) == (verdict["failure"]["code"], verdict["failure"]["rank"])


def test_a_run_that_ends_before_its_fault_proves_nothing(chaos, here):
    (here / "work.py").write_text("")
    answer = chaos("kill rank=0 at 100s", "work.py")
    assert (1, "not made") == (answer.status, answer.found["faults"][0]["outcome"])
    assert ["no fault was made: the run had ended"] == [one["message"] for one in answer.found["diagnostics"]]


def test_a_fault_that_is_told_wrongly_is_an_error(chaos, here):
    (here / "work.py").write_text("import signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(0))\nsignal.pause()\n")
    answer = chaos("term rank=0 at 2s", "work.py")
    assert (1, "unnoticed") == (answer.status, answer.found["faults"][0]["outcome"]), answer
    (found,) = answer.found["diagnostics"]
    assert ("R058", "`term rank=0 at 2s` was made, and the run ended as if nothing had been") == (
        found["code"],
        found["message"],
    )
