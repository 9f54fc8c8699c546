"""`--max-restarts` with real ranks: the same bits as if nothing had happened, and an end to what breaks every time."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import FORKED

pytestmark = pytest.mark.mpi

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = """\
training_config: {steps: 8, batch_size: 4, micro_batch_size: 2, validation_sequences: 4}
transformer_config: {num_blocks: 1, num_heads: 2, embedding_dim: 16, max_sequence_length: 16, dropout_prob: 0.1}
multihost_config: {num_workers: 2}
checkpoint_config: {interval: 2}
"""
# Appended to the recipe's trainer: rank 1 breaks when it is about to begin its sixth step.
BREAKS = """

_whole = worker


def saved(step):
    # The launcher completes a checkpoint beside the training: wait until this one is whole.
    import os, pathlib, time

    deadline = time.monotonic() + 60
    while not pathlib.Path(os.environ["TTLAUNCH_RUN_DIR"], "checkpoints", "step-%d" % step).is_dir():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return True


def worker(cfg, ctx):
    import os, pathlib, signal
    steps = ctx.steps

    def steps_until_it_breaks(cfg):
        for step in steps(cfg):
            if step == 6 and ctx.rank == 1 and {condition}:
                pathlib.Path("broken").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield step

    ctx.steps = steps_until_it_breaks
    _whole(cfg, ctx)
"""


@pytest.fixture
def run(tmp_path):
    """`run(condition, *options, recipe=…)`: a training whose rank 1 is killed in step 6 while the condition holds."""
    (tmp_path / "train.yaml").write_text(TINY)

    def start(condition, *options, recipe="data_parallel"):
        shutil.copytree(RECIPES / recipe, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
        trainer = tmp_path / "mine" / "trainer.py"
        trainer.write_text(trainer.read_text() + BREAKS.format(condition=condition))
        answer = subprocess.run(
            [sys.executable, "-m", "ttlaunch", "run", "mine", "-n", "2", "-c", "train.yaml", *FORKED, *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "NO_COLOR": "1"},
        )
        shutil.rmtree(tmp_path / "mine")
        return answer

    return start


@pytest.mark.core
def test_a_run_that_breaks_once_ends_with_the_bits_of_one_that_never_broke(run, tmp_path):
    """C16, D23: the rank that is killed owns half of each layer and its optimizer state, which nobody else has."""
    undisturbed = json.loads(run("False", "--format", "json", recipe="zero").stdout)
    once = "not os.path.exists('broken') and saved(4)"
    answer = run(once, "--max-restarts", "1", "--format", "json", recipe="zero")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["parameters_sha256"] == undisturbed["parameters_sha256"]
    (earlier,) = report["earlier"]
    assert (earlier["failure"]["code"], earlier["failure"]["rank"]) == ("R004", 1)
    assert answer.stderr == f"restart 1 of 1, from the newest checkpoint of {earlier['run_id']}\n"
    assert report["began_from"]["step"] == 4
    assert len([path for path in (tmp_path / "runs").glob("[!.]*") if path.is_dir()]) == 3


def test_what_breaks_every_time_is_given_up(run):
    answer = run("True", "--max-restarts", "9")
    assert answer.returncode == 8
    said = [line for line in answer.stderr.splitlines() if line.startswith(("error", "restart"))]
    assert [line.partition(",")[0] for line in said[1:-2:2]] == ["restart 1 of 9", "restart 2 of 9"]
    assert said[-1] == "error[R027]: given up: 2 restarts in a row came no further than step 5"


def test_without_the_option_nothing_is_repeated(run, tmp_path):
    assert run("True").returncode == 1
    assert len([path for path in (tmp_path / "runs").glob("[!.]*") if path.is_dir()]) == 1
