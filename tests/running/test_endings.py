"""An ordered end: ranks of a recipe leave after the same step and save it; who does not leave is killed after the grace."""

import json
import os
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.forked import FORKED
from tests.running.conftest import StartedRun
from ttlaunch import contract

pytestmark = pytest.mark.mpi

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 300
TRAINING = f"""\
training_config: {{steps: {STEPS}, batch_size: 4, micro_batch_size: 1, validation_sequences: 4, validation_interval: 500}}
transformer_config: {{num_blocks: 2, num_heads: 2, embedding_dim: 16, max_sequence_length: 16}}
checkpoint_config: {{interval: 1000}}
"""
# Every layout of the recipes, in which the order has its own way to find ranks in different steps.
LAYOUTS = {
    "three tiers": ("hierarchical_parallel", "multihost_config: {num_workers: 2}\n", 4),
    "two tiers": ("hierarchical_parallel", "multihost_config: {num_workers: 2}\n", 3),
    "one process": ("hierarchical_parallel", "multihost_config: {num_workers: 2}\n", 1),
    "canonical workers": ("data_parallel", "multihost_config: {num_workers: 2}\n", 2),
    "fast workers": (
        "data_parallel",
        "multihost_config: {num_workers: 2}\ndata_parallel_config: {reduction: fast}\n",
        2,
    ),
    "pipelines": (
        "pipeline_parallel",
        "multihost_config: {pipeline_parallel_config: {num_blocks: 2, blocks_per_rank: [1, 1], replicas: 2}}\n",
        4,
    ),
}
# A program that is no recipe: it takes its time to end, as one that writes a checkpoint does.
HANDLES_TERM = """\
import os, pathlib, signal, sys, threading
over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: over.set())
rank = os.environ["TTLAUNCH_RANK"]
pathlib.Path(f"part-{rank}").write_text("up")
os.replace(f"part-{rank}", f"ready-{rank}")
over.wait()
threading.Event().wait(float(sys.argv[1]) * int(rank))
pathlib.Path(f"saved-{rank}").write_text("")
sys.exit(5)
"""
# The sole rank trains a step, then hangs in the second where no order reaches it.
HANGS = """\
import os, pathlib, threading


def peer(cfg, ctx):
    ctx.report(1)
    ctx.should_stop()
    pathlib.Path("part").write_text("up")
    os.replace("part", "ready")
    wait_for_a_peer_that_is_gone()


def wait_for_a_peer_that_is_gone():
    threading.Event().wait()
"""


def begin(here, start_run, layout, *more):
    recipe, section, ranks = LAYOUTS[layout]
    (here / "train.yaml").write_text(TRAINING + section)
    return start_run(recipe, "-c", "train.yaml", "-n", str(ranks), *more)


def wait_for_step(run, until, step):
    def steps():
        if run.process.poll() is not None:
            pytest.fail(f"the run ended before step {step}:\n{run.stdout}{run.stderr}")
        folder = run.run_folder
        texts = [path.read_text() for path in folder.glob("records/*.progress.jsonl")] if folder else []
        return any(f'"step": {step},' in text for text in texts)

    until(steps, within_s=60, what=f"step {step}")


def last_steps(run):
    """By rank, the last step that it reported."""
    found = {}
    for row in run.report["ranks"]:
        steps = [record["step"] for record in run.records(row["rank"]) if record["kind"] == contract.KIND_STEP]
        found[row["rank"]] = steps[-1]
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The SHA-256 that this training ends with in every layout of a fixed order of sums."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "train.yaml").write_text(TRAINING)
    run = StartedRun(folder, ["hierarchical_parallel", "-c", "train.yaml", "-n", "1"])
    try:
        assert run.ends(within_s=120) == 0
        return run.report["parameters_sha256"]
    finally:
        run.close()


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pipelines"])
def test_after_ctrl_c_all_ranks_save_and_leave_after_the_same_step(here, start_run, until, layout):
    run = begin(here, start_run, layout)
    wait_for_step(run, until, 5)
    run.process.send_signal(signal.SIGINT)
    assert run.ends(within_s=20) == 130
    stop, report = run.report["stopped"], run.report
    assert set(last_steps(run).values()) == {stop["after_step"]}
    assert 5 <= stop["after_step"] < STEPS
    assert stop["saved_step"] == stop["after_step"]
    assert (report["status"], report["failure"], report["leftovers"]) == ("interrupted", None, 0)
    assert [rank["state"] for rank in report["ranks"]] == ["done"] * report["world_size"]
    assert run.stderr == ("Ctrl-C: ranks finish their step and save it, within 30 s; Ctrl-C again leaves them 5 s\n")
    assert f"\n  saved            step {stop['after_step']}\n  go on with       ttlaunch run " in run.stdout


@pytest.mark.core
def test_the_command_in_the_summary_goes_on_to_the_bits_of_an_uninterrupted_run(here, start_run, until, uninterrupted):
    run = begin(here, start_run, "pipelines", *FORKED)
    wait_for_step(run, until, 5)
    run.process.send_signal(signal.SIGTERM)
    assert run.ends(within_s=20) == 143
    first, stop = run.run_folder, run.report["stopped"]
    assert set(last_steps(run).values()) == {stop["after_step"]} == {stop["saved_step"]}
    assert run.report["status"] == "terminated"
    assert run.stderr.startswith("SIGTERM: ranks finish their step and save it, within 30 s; another signal ")
    command = shlex.split(stop["resume"])
    assert [command[:2], command[-2:]] == [["ttlaunch", "run"], ["--resume", first.name]]
    assert start_run(*command[2:], "-n", "1").ends(within_s=120) == 0
    [second] = [path for path in here.glob("runs/2*") if path != first]
    report = json.loads((second / contract.REPORT_FILE).read_text())
    assert report["began_from"]["step"] == stop["after_step"]
    assert report["parameters_sha256"] == uninterrupted


def test_all_reduces_without_steps_end_after_the_same_one(here, start_run, until):
    repeats = 10**7
    run = start_run("fabric_minimal", "-n", "2", "--set", f"all_reduce_config.repeats={repeats}")

    def begun():
        texts = [path.read_text() for path in here.glob("runs/*/records/*.progress.jsonl")]
        return sum(contract.KIND_READY in text for text in texts) == 2

    until(begun, within_s=60, what="both ranks have begun")
    run.process.send_signal(signal.SIGINT)
    assert run.ends(within_s=20) == 130
    assert run.report["stopped"]["outstayed"] == []
    assert run.report["stopped"]["after_step"] < repeats
    assert [rank["state"] for rank in run.report["ranks"]] == ["done", "done"]


def start_hanging(here, start_run, *more):
    shutil.copytree(RECIPES / "fabric_minimal", here / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    (here / "mine/trainer.py").write_text(HANGS)
    run = start_run("mine", "-n", "1", *more)
    run.wait_for_file("ready")
    return run


def assert_killed_with_its_stack(run):
    assert "in wait_for_a_peer_that_is_gone" in (run.run_folder / contract.stacks_file(0)).read_text()
    assert (run.report["status"], run.report["failure"]) == ("interrupted", None)
    assert run.processes() == []


def test_a_rank_that_does_not_leave_is_killed_after_the_grace_and_says_where_it_was(here, start_run):
    run = start_hanging(here, start_run, "--grace", "1.5")
    run.process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    assert run.ends(within_s=10) == 130
    assert time.monotonic() - sent >= 1.5
    assert_killed_with_its_stack(run)
    [late] = run.report["stopped"]["outstayed"]
    said = f"warning[R018]: rank 0 (peer, localhost) had not left after {late['after_s']:g} s and was killed\n"
    assert said in run.stderr
    assert f"what it was doing: runs/{run.run_folder.name}/stacks/rank-0.txt\n" in run.stderr


def test_a_third_ctrl_c_kills_at_once(here, start_run, until):
    run = start_hanging(here, start_run)
    for lines in (1, 2, 3):
        run.process.send_signal(signal.SIGINT)
        until(lambda lines=lines: run.stderr.count("\n") >= lines, within_s=5, what="the order is answered")
    sent = time.monotonic()
    assert run.ends(within_s=5) == 130
    print(f"\nthird Ctrl-C: {time.monotonic() - sent:.1f} s")
    assert run.stderr.splitlines() == [
        "Ctrl-C: ranks finish their step, within 30 s; Ctrl-C again leaves them 5 s",
        "5 s are left; Ctrl-C again ends every rank at once",
        "ending every rank at once",
    ]
    assert_killed_with_its_stack(run)
    assert run.report["stopped"]["outstayed"] == []


def test_a_program_has_its_grace_to_end_in_its_own_way_on_every_rank(here, start_run):
    (here / "work.py").write_text(HANDLES_TERM)
    run = start_run("work.py", "-n", "2", "--", "6")
    run.wait_for_file("ready-0")
    run.wait_for_file("ready-1")
    run.process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    assert run.ends(within_s=20) == 130
    print(f"\na handler of 6 s: {time.monotonic() - sent:.1f} s")
    assert sorted(path.name for path in here.glob("saved-*")) == ["saved-0", "saved-1"]
    assert run.report["failure"] is None
    assert [rank["status"] for rank in run.report["ranks"]] == [5, 5]
    assert run.stderr == "Ctrl-C: ranks were sent SIGTERM and have 30 s to end; Ctrl-C again leaves them 5 s\n"


def test_without_a_grace_the_run_ends_at_once(here, start_run):
    run = start_hanging(here, start_run, "--grace", "0")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.ends(within_s=5) == 143
    assert run.stderr == "SIGTERM: ending every rank at once\n"
