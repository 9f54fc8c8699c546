"""Runs whose workers are killed, stopped and replaced end with the parameters of one process, and say what happened."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.changed_recipes import changed_recipe, slow_recipe
from tests.runtime.elastic.local_replay import replay
from ttlaunch import contract
from ttlaunch.agent.run_processes import run_processes
from ttlaunch.running.checkpoints.complete import newest_step
from ttlaunch.running.checkpoints.last_states import whole_steps
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.running.membership.journal import read_journal

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.mpi

STEPS = 24
COMMAND = [sys.executable, "-m", "ttlaunch", "run"]
SET = ["--set", f"training_config.steps={STEPS}"]
MOST_S = 240.0


class Running:
    """A run that goes on in the background."""

    def __init__(self, process, here):
        self.process, self.here = process, here

    @property
    def folder(self):
        [folder] = self.until(lambda: [path for path in self.here.glob("runs/[!.]*") if path.is_dir()])
        return folder

    def journal(self, what):
        return [entry for entry in read_journal(self.folder) if entry["what"] == what]

    def pid(self, number):
        lines = (self.folder / contract.progress_file(number)).read_text().splitlines()
        [pid] = [record["pid"] for record in map(json.loads, lines) if record["kind"] == contract.KIND_STARTED]
        return pid

    def shim_pid(self, number):
        return int(re.search(r"^PPid:\t(\d+)$", Path(f"/proc/{self.pid(number)}/status").read_text(), re.MULTILINE)[1])

    def until(self, look):
        """Wait until `look` returns something true, and return that; fail when the run has ended before."""
        return wait_for(lambda: self._look(look))

    def _look(self, look):
        has_ended = self.process.poll() is not None  # asked first: what is looked for may be there once it has ended
        found = look()
        assert found or not has_ended, f"the run has ended before: {self.process.communicate()[1]}"
        return found

    def step(self):
        """The last step that any worker has made."""
        files = self.folder.glob("records/rank-*.progress.jsonl")
        records = (contract.read_record(line) for file in files for line in file.read_text().splitlines())
        return max((record["step"] for record in records if record and record["kind"] == contract.KIND_STEP), default=0)

    def report(self):
        _, stderr = self.process.communicate(timeout=MOST_S)
        path = self.folder / contract.REPORT_FILE
        assert path.is_file(), stderr
        assert [] == run_processes(self.folder.name)
        return json.loads(path.read_text())


def wait_for(look):
    end = time.monotonic() + MOST_S
    while not (found := look()):
        assert time.monotonic() < end, "nothing of what was expected has happened"
        time.sleep(0.02)
    return found


@contextmanager
def running(here, *arguments, recipe="data_parallel", ranks=3, elastic="1:3", is_warm=True):
    """A run whose workers are forks of one process unless `is_warm` is false, because each would import torch for seconds."""
    warm = ["--warm"] if is_warm else []
    command = [*COMMAND, recipe, *SET, "-n", str(ranks), "--elastic", elastic, *warm, *arguments]
    with subprocess.Popen(command, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        yield Running(process, here)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The parameters of one process, which has neither workers nor messages."""
    here = tmp_path_factory.mktemp("one")
    command = [*COMMAND, "data_parallel", *SET, "-n", "1", "--format", "json"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True)
    return json.loads(done.stdout)["parameters_sha256"]


@pytest.mark.parametrize(("kills", "is_warm"), [({3: 0, 9: 1}, False), ({6: 2, 7: 0, 15: 1}, True)])
@pytest.mark.core
def test_killed_workers_are_replaced_and_the_parameters_are_those_of_one_process(here, expected, kills, is_warm):
    with running(here, ranks=4, elastic="1:4", is_warm=is_warm) as run:
        for step, victim in kills.items():
            run.until(lambda step=step: run.step() >= step)
            os.kill(run.pid(victim), signal.SIGKILL)
        report = run.report()
    assert ("done", expected, True) == (report["status"], report["parameters_sha256"], report["parameters_agree"])
    assert list(kills.values()) == [entry["worker"] for entry in run.journal("lost")]
    assert {"was killed by SIGKILL"} == {entry["reason"] for entry in run.journal("lost")}
    reasons = {reason for epoch in report["epochs"] for reason in epoch["reasons"]}
    assert {f"worker-000{victim} was killed by SIGKILL" for victim in kills.values()} <= reasons
    assert {victim + 4 for victim in kills.values()} <= {row["rank"] for row in report["ranks"]}
    assert STEPS == report["steps"]
    command = [sys.executable, "-m", "ttlaunch", "report", "latest"]
    shown = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True).stdout
    assert re.search(r"because\n +1 +0 +0-3 +0 +[0-9.]+ +(?:–|1\.000) +the run began\n +2 ", shown)
    compared = [sent for epoch in report["epochs"] if (sent := epoch["traffic"]) is not None]
    assert [sent["formula_bytes"] for sent in compared] == [sent["bytes"] for sent in compared]
    assert (0, "same bits") == repeated(
        here, run.folder.name
    )  # in one process, although the plan has rows for many workers


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 11, 17, 38, 39])
def test_random_plans_of_one_to_five_faults_leave_the_parameters_of_one_process(here, expected, seed):
    """Plans that leave a worker with the weights; `benchmarks/elastic_chaos.py` draws a hundred, with those that do not."""
    drawn = ["--random", str(1 + seed % 5), "--seed", str(seed)]
    command = [*COMMAND[:-1], "chaos", "data_parallel", *SET, "-n", "3", "--elastic", "1:3", "--warm", *drawn]
    done = subprocess.run(
        [*command, "--format", "json"], cwd=here, capture_output=True, text=True, timeout=MOST_S, check=False
    )
    found = json.loads(done.stdout)
    assert (0, 1 + seed % 5) == (done.returncode, len(found["faults"])), found
    assert any(fault["outcome"] != "not made" for fault in found["faults"])
    assert ("done", expected) == (found["report"]["status"], found["report"]["parameters_sha256"])


def test_a_worker_that_comes_gets_three_times_the_weights_and_a_mean_for_each_step_it_follows_in_equal_parts(here):
    slow_recipe(here)
    with running(here, recipe="mine", ranks=4, elastic="1:4") as run:
        run.until(lambda: run.step() >= 3)
        os.kill(run.pid(2), signal.SIGKILL)
        run.until(lambda: any(6 in entry["members"] for entry in run.journal("epoch")))
        (here / "quick").touch()
        report = run.report()
    assert "done" == report["status"]
    [given] = run.journal("given")
    found = verify(run.folder / "checkpoints" / f"step-{newest_step(run.folder)}")
    whole = sum(
        file["size"] for file in found.manifest["files"].values()
    )  # with a header; moments and weights have equal sizes
    weights = 4 * sum(one["values"] for one in tensors_of(found) if not one["name"].startswith("optimizer."))
    assert 3 * weights <= whole <= 3 * weights + 20_000
    assert {"0", "1", "3"} == given["bytes"].keys()
    assert given["states"] >= 1  # another one comes where the means of too many steps are missing
    expected, small = (3 * given["states"] + given["means"]) * weights, 100 * (given["states"] + given["means"])
    assert expected <= sum(given["bytes"].values()) <= expected + small
    assert max(given["bytes"].values()) <= 1.05 * sum(given["bytes"].values()) / 3
    sent = report["epochs"][-1]["traffic"]  # of workers that have all written what they sent
    assert sent["formula_bytes"] == sent["bytes"] > 0


def tensors_of(checkpoint):
    """Return name and number of values of each tensor of a checkpoint, by the headers of its files."""
    for name in checkpoint.manifest["files"]:
        data = (checkpoint.path / name).read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        yield from (
            {"name": tensor, "values": math.prod(one["shape"])}
            for tensor, one in header.items()
            if tensor != "__metadata__"
        )


def test_workers_that_wait_for_each_others_gradients_are_replaced_with_the_bits_of_one_process(here):
    """`classic_dp` without staleness; its `beta1` differs from that of `data_parallel`, so its parameters do, too."""
    together = ["--set", "classic_dp_config.staleness_bound=0", "--set", "training_config.validation_interval=4"]
    one = [*COMMAND, "classic_dp", *SET, *together, "-n", "1", "--format", "json", "--runs-dir", str(here / "one")]
    done = subprocess.run(one, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True)
    expected = json.loads(done.stdout)
    with running(here, *together, recipe="classic_dp") as run:
        for step, victim in {4: 0, 11: 2}.items():
            run.until(lambda step=step: run.step() >= step)
            os.kill(run.pid(victim), signal.SIGKILL)
        report = run.report()
    assert ("done", True, STEPS) == (report["status"], report["parameters_agree"], report["steps"])
    assert expected["parameters_sha256"] == report["parameters_sha256"]
    assert [0, 2] == [entry["worker"] for entry in run.journal("lost")]
    validations = ("first_validation", "last_validation")
    assert [expected[key] for key in validations] == [report[key] for key in validations]


def repeated(here, name):
    """Repeat a run; return the exit status, and whether the bits were the same, or why not."""
    command = [sys.executable, "-m", "ttlaunch", "repro", name]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=False)
    return done.returncode, "same bits" if f"same bits as     {name}" in done.stdout else done.stderr


def test_workers_with_steps_of_their_own_end_with_the_bits_of_the_journal(here):
    """Worker 0 goes between two averages, its replacement comes between two others, and worker 2 is asked to leave."""
    slow_recipe(here, recipe="diloco")
    more = ["--set", "training_config.steps=60", "--set", "checkpoint_config.interval=50"]
    more += ["--set", "scheduler_config.type=constant"]
    with running(here, *more, recipe="mine") as run:
        run.until(lambda: run.step() >= 3)
        os.kill(run.pid(0), signal.SIGKILL)
        run.until(lambda: any(3 in entry["members"] for entry in run.journal("epoch")))
        leave = [sys.executable, "-m", "ttlaunch", "workers", run.folder, "--remove", "worker-0002"]
        subprocess.run(leave, cwd=here, capture_output=True, timeout=MOST_S, check=True)
        (here / "quick").touch()
        report = run.report()
    assert ("done", True, 60) == (report["status"], report["parameters_agree"], report["steps"])
    journal, config = run.journal("epoch"), json.loads((run.folder / contract.PLAN_FILE).read_text())["config"]
    assert replay(here / "replay", config, journal, recipe="diloco") == report["parameters_sha256"]
    assert [1, 3] == journal[-1]["members"]
    assert [entry["lost_steps"] for entry in journal] == [epoch["lost_steps"] for epoch in report["epochs"]]
    folder = run.folder
    assert (0, "same bits") == repeated(here, folder.name)
    # Three workers go on, and the checkpoint has the state of two.
    again = [*COMMAND, "mine", *more, "--set", "training_config.steps=64", "--elastic", "1:3", "--warm"]
    done = subprocess.run(
        [*again, "-n", "3", "--resume", folder, "--format", "json"],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert ("done", 64) == (json.loads(done.stdout)["status"], json.loads(done.stdout)["steps"])
    assert (0, "same bits") == repeated(here, json.loads(done.stdout)["run_id"])


def test_a_worker_that_comes_late_gets_the_weights_from_the_others_and_takes_part(here):
    slow_recipe(here)
    with running(here, "--set", "training_config.steps=200", recipe="mine", ranks=2, elastic="1:2") as run:
        run.until(lambda: run.step() >= 3)
        os.kill(run.pid(1), signal.SIGKILL)
        run.until(lambda: any(3 in entry["members"] for entry in run.journal("epoch")))
        (here / "quick").touch()
        first = run.step()
        run.until(lambda: run.step() > first + 2)
        os.kill(run.pid(0), signal.SIGKILL)  # now the weights are nowhere but in the one that has come
        run.until(lambda: run.journal("epoch")[-1]["members"] == [3])
        os.kill(run.process.pid, signal.SIGINT)
        report = run.report()
    assert "interrupted" == report["status"]
    assert report["stopped"]["after_step"] == max(row["step"] for row in report["ranks"])


def test_a_stopped_worker_counts_as_hung_and_the_others_go_on(here, expected):
    with running(here) as run:
        run.until(lambda: run.step() >= 4)
        os.kill(run.pid(2), signal.SIGSTOP)
        report = run.report()
    assert ("done", expected) == (report["status"], report["parameters_sha256"])
    [lost] = run.journal("lost")
    assert (2, True) == (lost["worker"], lost["reason"].startswith("made no progress for "))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_server_or_worker_is_replaced_and_those_that_wait_for_it_are_not(here, victim):
    """Worker 1 keeps the state together with server 0, and waits for its totals in a receive that blocks."""
    one = [*COMMAND, "sync_ps", *SET, "-n", "1", "--format", "json", "--runs-dir", str(here / "one")]
    done = subprocess.run(one, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True)
    with running(here, recipe="sync_ps", elastic="2:3") as run:
        run.until(lambda: run.step() >= 4)
        os.kill(run.pid(victim), signal.SIGSTOP)
        report = run.report()
    assert ("done", json.loads(done.stdout)["parameters_sha256"]) == (report["status"], report["parameters_sha256"])
    [lost] = run.journal("lost")
    assert (victim, True) == (lost["worker"], lost["reason"].startswith("made no progress for "))


def test_ctrl_c_saves_the_step_also_after_a_shim_was_killed(here):
    with running(here, "--set", "training_config.steps=400") as run:
        run.until(lambda: run.step() >= 4)
        os.kill(run.shim_pid(1), signal.SIGKILL)
        run.until(lambda: run.journal("lost"))
        os.kill(run.process.pid, signal.SIGINT)
        report = run.report()
    assert ("interrupted", report["stopped"]["after_step"]) == (report["status"], report["stopped"]["saved_step"])
    assert report["stopped"]["saved_step"] is not None


@pytest.mark.parametrize(("victim", "code"), [("pid", "R004"), ("shim_pid", "R006")])
def test_a_run_whose_last_worker_is_killed_names_it(here, victim, code):
    with running(here, ranks=1, elastic="1:1") as run:
        run.until(lambda: run.step() >= 3)
        os.kill(getattr(run, victim)(0), signal.SIGKILL)
        report = run.report()
    failure = report["failure"]
    assert ("failed", code, 0) == (report["status"], failure["code"], failure["rank"])
    started = {row["rank"] for row in report["ranks"]}
    assert {follower["rank"] for follower in failure["cascade"]} <= started - {0}
    assert "stranded" == read_journal(run.folder)[-1]["what"]


def test_a_last_checkpoint_whose_writer_is_killed_before_is_missing_and_the_report_says_so(here, expected):
    suicide = f"if step == {STEPS} and ctx.rank == 0: __import__('os').kill(__import__('os').getpid(), 9)"
    changed_recipe(here, "rate = optimizer.step(step, norm=norm)", suicide)
    with running(here, "--set", "checkpoint_config.interval=10", recipe="mine") as run:
        report = run.report()
    assert ("done", expected) == (report["status"], report["parameters_sha256"])
    assert STEPS == report["steps"]
    missing = [] if newest_step(run.folder) == STEPS else [STEPS]
    assert missing == [one["step"] for one in report["lost_checkpoints"]]


SUICIDE_BEFORE_A_RENAME = """
import os as _os
from pathlib import Path as _Path

_rename = _Path.replace


def _replace(self, target):
    if self.parent.name == "step-{step}.tmp" and target.suffix == "{suffix}" and _os.environ["TTLAUNCH_RANK"] == "0":
        _os.kill(_os.getpid(), 9)
    return _rename(self, target)


_Path.replace = _replace
"""


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_last_checkpoint_whose_writer_is_killed_while_it_writes_is_made_again_by_another_worker(
    here, expected, suffix
):
    """It is killed in its thread that writes: before the shard, or before the shard's record."""
    changed_recipe(here, "for step in loop.steps():", "pass")
    trainer = here / "mine" / "trainer.py"
    trainer.write_text(trainer.read_text() + SUICIDE_BEFORE_A_RENAME.format(step=STEPS, suffix=suffix))
    with running(here, "--set", "checkpoint_config.interval=10", recipe="mine") as run:
        report = run.report()
    assert ("done", expected, []) == (report["status"], report["parameters_sha256"], report["lost_checkpoints"])
    assert [0] == [entry["worker"] for entry in run.journal("lost")]
    checkpoint = verify(run.folder / f"checkpoints/step-{STEPS}")
    assert [1] == [int(name.removeprefix("rank-").partition(".")[0]) for name in checkpoint.manifest["files"]]
    assert {"manifest.json", "rank-1.safetensors"} == {path.name for path in checkpoint.path.iterdir()}


def test_an_exception_that_every_worker_raises_ends_the_run_with_its_line(here):
    place = changed_recipe(here, "for step in loop.steps():", "assert step < 3, 'no further'")
    with running(here, recipe="mine") as run:
        report = run.report()
    failure = report["failure"]
    assert ("failed", "R002") == (report["status"], failure["code"])
    assert failure["place"].endswith(place)


def kill_the_supervisor(run):
    """Kill the process that the run's coordinator is a part of, and wait until nothing of the run is left."""
    os.kill(json.loads((run.folder / contract.LAUNCHER_FILE).read_text())["pid"], signal.SIGKILL)
    _, stderr = run.process.communicate(timeout=MOST_S)
    assert [] == run_processes(run.folder.name)
    return stderr


def resumed(here, *arguments, recipe="data_parallel", ranks=2, elastic="1:2"):
    """Resume the newest run; returns the report of the new one, and what it printed."""
    command = [*COMMAND, recipe, *SET, "--resume", "latest", "-n", str(ranks), "--elastic", elastic, "--warm"]
    done = subprocess.run([*command, *arguments], cwd=here, capture_output=True, text=True, timeout=MOST_S, check=False)
    assert 0 == done.returncode, done.stderr
    newest = max(here.glob("runs/*/report.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text()), done.stderr + done.stdout


@pytest.mark.parametrize("recipe", ["data_parallel", "classic_dp"])
def test_a_run_whose_supervisor_is_killed_goes_on_without_a_lost_step_from_the_memory_of_its_workers(
    here, expected, recipe
):
    together = ["--set", "classic_dp_config.staleness_bound=0"] if recipe == "classic_dp" else []
    if together:
        one = [*COMMAND, recipe, *SET, *together, "-n", "1", "--format", "json", "--runs-dir", str(here / "one")]
        done = subprocess.run(one, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True)
        expected = json.loads(done.stdout)["parameters_sha256"]
    with running(here, *together, "--set", "checkpoint_config.interval=5", recipe=recipe) as run:
        run.until(lambda: run.step() >= 7)
        stderr, folder, seen = kill_the_supervisor(run), run.folder, run.step()
    assert "error[R050]" in stderr
    [state] = (folder / contract.LAST_STATES_DIR).iterdir()
    step = int(state.name.removeprefix("step-"))
    assert step >= seen >= 7
    assert f" = note: its workers saved the state of step {step} from memory\n" in stderr
    report, shown = resumed(here, *together, recipe=recipe)
    assert (expected, True, STEPS) == (report["parameters_sha256"], report["parameters_agree"], report["steps"])
    assert (step, str(folder / f"checkpoints/step-{step}")) == tuple(
        report["began_from"][key] for key in ("step", "origin")
    )
    assert f"warning[P084]: training goes on from step {step}, whose state worker-000" in shown
    assert report["began_from"]["saved_by"].startswith("worker-000")
    assert f"checkpoints/step-{step}, from the memory of {report['began_from']['saved_by']}\n" in shown


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_slots_that_no_worker_has_alone_outlive_the_supervisor(here, zero_stage):
    settings = ["--set", f"zero_config.stage={zero_stage}", "--set", "checkpoint_config.interval=null"]
    one = [*COMMAND, "zero", *SET, *settings, "-n", "1", "--format", "json", "--runs-dir", str(here / "one")]
    done = subprocess.run(one, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True)
    with running(here, *settings, recipe="zero") as run:
        run.until(lambda: run.step() >= 7)
        stderr, folder, seen = kill_the_supervisor(run), run.folder, run.step()
    [step] = whole_steps(folder)
    assert step >= seen >= 7
    assert f" = note: its workers saved the state of step {step} from memory\n" in stderr
    saved = {path.name for path in (folder / contract.last_state_dir(step)).iterdir()}
    assert {f"rank-{number}.{kind}" for number in range(3) for kind in ("json", "safetensors")} == saved
    report, shown = resumed(here, *settings, recipe="zero")
    assert (json.loads(done.stdout)["parameters_sha256"], STEPS) == (report["parameters_sha256"], report["steps"])
    assert f"warning[P084]: training goes on from step {step}, whose state the run's workers saved from memory" in shown
    assert f"checkpoints/step-{step}, from the memory of the run's workers\n" in shown


EVERY = 4
OTHERS = {
    "classic_dp": ["--set", "classic_dp_config.staleness_bound=2"],
    "diloco": ["--set", f"diloco_config.every={EVERY}"],
    "elastic_dp": [],
}


@pytest.mark.parametrize("recipe", OTHERS)
def test_what_workers_have_in_common_outlives_the_supervisor_also_where_bits_depend_on_who_comes(here, recipe):
    """With steps of their own they have the last average in common; the server of `elastic_dp` has all alone."""
    settings = [*OTHERS[recipe], "--set", "checkpoint_config.interval=null"]
    elastic = "2:3" if recipe == "elastic_dp" else "1:3"
    with running(here, *settings, recipe=recipe, elastic=elastic) as run:
        run.until(lambda: run.step() >= 7)
        kill_the_supervisor(run)
        folder, seen = run.folder, run.step()
    [state] = (folder / contract.LAST_STATES_DIR).iterdir()
    step = int(state.name.removeprefix("step-"))
    has_own_steps = recipe == "diloco"
    # Workers report a step of `classic_dp` up to two updates before its own, and a task of `elastic_dp` before it is applied.
    assert step >= (seen // EVERY * EVERY if has_own_steps else seen - 3) > 0
    assert not has_own_steps or 0 == step % EVERY
    report, shown = resumed(here, *settings, recipe=recipe, ranks=3, elastic=elastic)
    assert ("done", True, STEPS) == (report["status"], report["parameters_agree"], report["steps"])
    assert step == report["began_from"]["step"]
    assert f"warning[P084]: training goes on from step {step}, whose state worker-000" in shown


def test_a_saved_state_that_was_changed_is_named_and_the_newest_checkpoint_is_taken(here, expected):
    slow_recipe(here)  # else the run may be done before its supervisor is killed
    with running(here, "--set", "checkpoint_config.interval=5", recipe="mine") as run:
        # Well before the next checkpoint, so that the state that the workers save is of a step that has none.
        run.until(lambda: newest_step(run.folder) and run.step() % 5 in {1, 2} and run.step() > newest_step(run.folder))
        kill_the_supervisor(run)
        folder = run.folder
    [state] = (folder / contract.LAST_STATES_DIR).iterdir()
    [shard] = state.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (here / "quick").touch()
    report, shown = resumed(here, recipe="mine")
    newest = newest_step(folder)  # of a checkpoint that was complete but for its manifest, too
    assert newest < int(state.name.removeprefix("step-"))
    assert (expected, newest) == (report["parameters_sha256"], report["began_from"]["step"])
    where = f"runs/{folder.name}/{contract.LAST_STATES_DIR}/{state.name}"
    assert f"{where}: {shard.name} was changed: its SHA-256 differs" in shown


def test_a_machine_that_stood_still_has_lost_no_worker(here):
    """The supervisor goes on first, and looks who has made progress before any worker can."""
    slow_recipe(here, pause_s=0.2)
    with running(here, recipe="mine/", ranks=2, elastic="1:2") as run:
        run.until(lambda: run.step() > 6)
        supervisor = json.loads((run.folder / contract.LAUNCHER_FILE).read_text())["pid"]
        for pid in (workers := [run.pid(0), run.pid(1)]):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)  # it takes what they have reported: what it takes only afterwards would count as new
        os.kill(supervisor, signal.SIGSTOP)
        time.sleep(6.0)  # longer than a worker in a step may make no progress
        os.kill(supervisor, signal.SIGCONT)
        wait_for(lambda: "stood_still" in (run.folder / contract.EVENTS_FILE).read_text())
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        (here / "quick").touch()
        report = run.report()
    assert ("done", [[0, 1]]) == (report["status"], [one["members"] for one in report["epochs"]])
