"""Interrupted runs with real ranks: whatever layout goes on, it ends with the bits of the run nobody disturbed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.forked import FORKED
from ttlaunch import contract
from ttlaunch.agent.run_processes import run_processes

pytestmark = pytest.mark.mpi

SECTIONS = """\
training_config: {{steps: {steps}, batch_size: 4, micro_batch_size: 1, validation_sequences: 4, validation_interval: 12}}
transformer_config: {{num_blocks: 4, num_heads: 2, embedding_dim: 32, max_sequence_length: 16, dropout_prob: 0.1}}
scheduler_config: {{type: cosine, warmup_steps: 5}}
checkpoint_config: {{interval: 8}}
"""
STEPS = 24
LAYOUTS = {
    "single": ("hierarchical_parallel", 1, ""),
    "two tiers": ("hierarchical_parallel", 4, "multihost_config: {num_workers: 3}\n"),
    "three tiers": ("hierarchical_parallel", 4, "multihost_config: {num_workers: 2}\n"),
    "data parallel": ("data_parallel", 3, "multihost_config: {num_workers: 3}\n"),
    "two stages": ("pipeline_parallel", 2, "multihost_config: {pipeline_parallel_config: {blocks_per_rank: [3, 1]}}\n"),
    "four stages": (
        "pipeline_parallel",
        4,
        "multihost_config: {pipeline_parallel_config: {blocks_per_rank: [1, 1, 1, 1]}}\n",
    ),
}


class Training:
    """A folder in which `ttlaunch run` is called, again and again."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, layout, *options, steps=STEPS, environment=None):
        recipe, ranks, section = LAYOUTS[layout]
        (self.folder / "train.yaml").write_text(SECTIONS.format(steps=steps) + section)
        words = ["run", recipe, "--ranks", str(ranks), "-c", "train.yaml", "--format", "json", *FORKED, *options]
        return subprocess.Popen(
            [sys.executable, "-m", "ttlaunch", *words],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "NO_COLOR": "1", **(environment or {})},
        )

    def run(self, layout, *options, **settings):
        """The report of a run that has come to its end, and what was said on standard error."""
        process = self.start(layout, *options, **settings)
        out, err = process.communicate(timeout=200)
        assert out, err
        return json.loads(out), err

    def runs(self):
        return sorted(path for path in (self.folder / "runs").glob("[!.]*") if path.is_dir())

    def records(self, run, kind):
        texts = [path.read_text() for path in (run / contract.RECORDS_DIR).glob("*.progress.jsonl")]
        records = [json.loads(line) for text in texts for line in text.splitlines()]
        return [record for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The parameters' SHA-256 of one process that nobody interrupts."""
    report, err = Training(tmp_path_factory.mktemp("undisturbed")).run("single")
    assert report["status"] == "done", err
    return report["parameters_sha256"]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """`interrupted(layout)`: a training of that layout of which only the checkpoint of step 16 is left."""
    trainings = {}

    def make(layout):
        if layout not in trainings:
            training = Training(tmp_path_factory.mktemp("interrupted"))
            report, err = training.run(layout)
            assert report["status"] == "done", err
            (run,) = training.runs()
            assert ["step-16", "step-24", "step-8"] == sorted(path.name for path in (run / "checkpoints").iterdir())
            for step in (8, 24):
                shutil.rmtree(run / contract.checkpoint_dir(step))
            trainings[layout] = training
        return trainings[layout]

    return make


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("single", "three tiers"),
        ("three tiers", "two stages"),
        ("two stages", "four stages"),
        ("four stages", "two tiers"),
        ("two tiers", "data parallel"),
        ("data parallel", "single"),
    ],
)
def test_a_run_goes_on_in_any_layout(interrupted, undisturbed, before, after):
    """A ring through all layouts; all pairs, in one process, in `tests/runtime/test_resume_layouts.py`; three tiers that go on
    as three tiers below."""
    training = interrupted(before)
    report, err = training.run(after, "--resume", training.runs()[0].name)
    assert ("done", "") == (report["status"], err)
    assert undisturbed == report["parameters_sha256"]
    run = training.folder / "runs" / report["run_id"]
    steps = {record["step"] for record in training.records(run, contract.KIND_STEP)}
    assert set(range(17, STEPS + 1)) == steps  # none is repeated, none is left out
    manifest = json.loads((run / "checkpoints/step-24/manifest.json").read_text())
    assert str(training.runs()[0] / "checkpoints/step-16") == manifest["began_from"]


def test_a_run_that_was_done_can_be_resumed_and_has_nothing_to_do(tmp_path, undisturbed):
    training = Training(tmp_path)
    training.run("single")
    report, _ = training.run("two stages", "--resume", "latest")
    assert ("done", undisturbed) == (report["status"], report["parameters_sha256"])
    assert [] == training.records(training.folder / "runs" / report["run_id"], contract.KIND_STEP)


def wait_for(condition, *, process, within_s=60):
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


@pytest.mark.parametrize(
    ("before", "writer", "after"),
    [
        ("three tiers", 3, "data parallel"),
        ("three tiers", None, "three tiers"),
        ("data parallel", 0, "two stages"),
        ("two stages", 1, "two tiers"),
    ],
    ids=["a rank of three tiers", "the supervisor", "a rank of data parallel", "a rank of a pipeline"],
)
def test_killed_while_saving_the_run_goes_on_to_the_same_bits(tmp_path, undisturbed, before, writer, after):
    """The victim is a rank that writes, or the supervisor, which would complete the checkpoint; no torn one is chosen."""
    training = Training(tmp_path)
    process = training.start(before)
    folder = tmp_path / "runs"
    # Of step 16, or a later one where the machine did not let us look in time.
    saving = wait_for(lambda: [*folder.glob("*/checkpoints/step-[123]?.tmp")], process=process)[0]
    run = saving.parents[1]
    if writer is None:
        os.kill(json.loads((run / contract.LAUNCHER_FILE).read_text())["pid"], signal.SIGKILL)
    else:
        record = (run / contract.progress_file(writer)).read_text().splitlines()[0]
        with contextlib.suppress(ProcessLookupError):  # training has ended meanwhile
            os.kill(json.loads(record)["pid"], signal.SIGKILL)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while run_processes(run.name):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    report, _ = training.run(after, "--resume", "latest")
    assert ("done", undisturbed) == (report["status"], report["parameters_sha256"])
    assert report["began_from"]["step"] in {8, 16, 24}  # 24 where the machine let training end before it was killed


def test_a_run_that_has_nothing_left_to_train_says_so_and_nothing_else(tmp_path):
    training = Training(tmp_path)
    whole, _ = training.run("two stages", steps=3)
    process = training.start("two stages", "--resume", "latest", "--format", "full", steps=3)
    shown, said = process.communicate(timeout=60)
    assert (0, True) == (process.returncode, whole["parameters_sha256"] in shown)
    assert "  steps            none: nothing is left to train after step 3\n" in shown
    assert "R045" not in said


@pytest.fixture
def small_disk(make_disk):
    """A file system with room for a run's records and the first checkpoint, not for the second.

    What is left beside one of 838 kB is less than another and the 1 MiB that is kept for records, and far more than records take.
    """
    return make_disk("2500k")


def test_a_full_disk_ends_the_run_and_names_the_file(tmp_path, small_disk, undisturbed):
    training = Training(tmp_path / "work")
    report, _ = training.run("single", "--runs-dir", str(small_disk))
    run = small_disk / report["run_id"]
    cause = f"could not keep a checkpoint: step 16: {run}/checkpoints/step-16.tmp/rank-0.safetensors: no space left on device"
    assert ("R030", cause) == (report["failure"]["code"], report["failure"]["cause"])
    assert ("failed", 1) == (report["status"], report["exit_status"])
    shutil.copytree(small_disk, tmp_path / "work/runs")
    report, _ = training.run("two tiers", "--resume", "latest")
    assert ("done", undisturbed) == (report["status"], report["parameters_sha256"])
    assert 8 == report["began_from"]["step"]
    (reason,) = report["began_from"]["passed_over"]
    assert reason.endswith("/checkpoints/step-16.tmp: it was not finished")


def test_a_full_disk_is_only_said_if_so_configured(tmp_path, small_disk, undisturbed):
    training = Training(tmp_path / "work")
    options = ("--runs-dir", str(small_disk), "--set", "checkpoint_config.on_error=continue")
    report, _ = training.run("single", *options)
    assert ("done", undisturbed) == (report["status"], report["parameters_sha256"])
    run = small_disk / report["run_id"]
    assert [16, 24] == [loss["step"] for loss in report["lost_checkpoints"]]
    assert all(loss["reason"].endswith("no space left on device") for loss in report["lost_checkpoints"])
    (warning,) = report["diagnostics"]
    assert ("R032", "warning") == (warning["code"], warning["severity"])
    assert "steps 16, 24 have no checkpoint" == warning["message"]
    assert ["step-8"] == [path.name for path in (run / "checkpoints").iterdir()]


def test_each_lost_checkpoint_of_several_ranks_is_said_once(tmp_path, small_disk):
    """Parts of a shared checkpoint may have been written; nothing of it stays."""
    training = Training(tmp_path / "work")
    (small_disk / "filler").write_bytes(bytes(900_000))
    words = ("--runs-dir", str(small_disk), "--set", "checkpoint_config.on_error=continue", "--format", "full")
    shown, said = training.start("four stages", *words).communicate(timeout=60)
    (run,) = (path for path in small_disk.glob("[!.]*") if path.is_dir())
    lost = [loss["step"] for loss in json.loads((run / "report.json").read_text())["lost_checkpoints"]]
    assert {24} <= set(lost) <= {8, 16, 24}
    live = [line for line in said.splitlines() if line.startswith("warning[R032]: step ") and ": /" in line]
    assert lost == [int(line.split()[2]) for line in live]
    have = f"steps {', '.join(map(str, lost))} have" if len(lost) > 1 else "step 24 has"
    assert f"warning[R032]: {have} no checkpoint\n" in said
    assert f"  no checkpoint of {', '.join(map(str, lost))}\n" in shown
    assert [] == [path.name for path in (run / "checkpoints").iterdir() if path.name.endswith(".tmp")]


def test_weights_of_another_size_are_named_by_the_rank_that_finds_out(interrupted, tmp_path):
    training = interrupted("single")
    weights = tmp_path / "w.safetensors"
    export = [sys.executable, "-m", "ttlaunch", "weights", "export", "latest", str(weights)]
    subprocess.run(export, cwd=training.folder, check=True, capture_output=True)
    options = f"checkpoint_config.initial_weights={weights}", "transformer_config.embedding_dim=16"
    report, _ = training.run("two tiers", *(word for option in options for word in ("--set", option)))
    expected = f"`blocks.0.attention_in.bias` of {weights} is float32 (96,), this model's is float32 (48,)"
    assert ("R031", f"could not begin: {expected}") == (report["failure"]["code"], report["failure"]["cause"])
    log = training.runs()[-1] / contract.stderr_file(report["failure"]["rank"])
    assert f"error: {expected}\n" == log.read_text()  # no line of a program is at fault


def test_initial_weights_begin_a_new_training(interrupted, tmp_path):
    training = interrupted("single")
    weights = tmp_path / "w.safetensors"
    export = [sys.executable, "-m", "ttlaunch", "weights", "export", "latest", str(weights)]
    subprocess.run(export, cwd=training.folder, check=True, capture_output=True)
    option = f"checkpoint_config.initial_weights={weights}"
    single, _ = training.run("single", "--set", option, steps=5)
    staged, _ = training.run("four stages", "--set", option, steps=5)
    assert ("done", "done") == (single["status"], staged["status"])
    assert single["parameters_sha256"] == staged["parameters_sha256"]
    validations = training.records(training.runs()[0], contract.KIND_VALIDATION)
    (drawn,) = (record["loss"] for record in validations if record["step"] == 0)
    assert single["first_validation"] < 0.9 * drawn
