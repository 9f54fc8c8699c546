"""A flipped bit in a run on real ranks: who is named, which checkpoints stay, and how the run goes on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ttlaunch as library
from tests.forked import FORKED, FORKED_IN_PYTHON
from ttlaunch import contract

pytestmark = pytest.mark.mpi

RECIPES = Path(__file__).parents[2] / "recipes"
UPDATED = "            loop.end_step(step, loss=loss"
FLIP = """            if (here := Path(__file__).with_name("flip.txt")).exists():
                rank, at = map(int, here.read_text().split())
                if (ctx.rank, step) == (rank, at):
                    dict(optimizer.named_state())["mean.head.output.weight"].view(torch.int32)[3, 5] ^= 1
"""
SMALL = {
    "training_config": {"steps": 24, "batch_size": 4, "micro_batch_size": 1, "validation_sequences": 4},
    "transformer_config": {"num_blocks": 1, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16},
}
KEYS = {f"{section}.{key}": value for section, keys in SMALL.items() for key, value in keys.items()}


@pytest.fixture
def recipe(here):
    """A copy of `data_parallel` that flips the lowest bit of a moment in the rank and after the step of `flip.txt`."""
    folder = here / "recipes/flips"
    shutil.copytree(RECIPES / "data_parallel", folder, ignore=shutil.ignore_patterns("__pycache__"))
    trainer = folder / "trainer.py"
    text = trainer.read_text(encoding="utf-8")
    assert 1 == text.count(UPDATED)
    trainer.write_text(
        text.replace(UPDATED, FLIP + UPDATED).replace("import torch\n", "from pathlib import Path\n\nimport torch\n", 1)
    )
    return folder


def run(workers, **options):
    keys = KEYS | {"training_config.verify_interval": 6, "checkpoint_config.interval": 4}
    keys |= {"multihost_config.num_workers": workers, "checkpoint_config.keep": 20}
    return library.run("flips", set=keys | FORKED_IN_PYTHON["set"], warm=True, **options)


def test_the_rank_with_the_flipped_bit_is_named_and_the_run_goes_on_from_the_last_step_that_agreed(recipe, here):
    (recipe / "flip.txt").write_text("0 18")
    flipped = run(3)
    said = (
        "rank 0 (worker, localhost) had other bits in `optimizer.mean.head.output.weight` than ranks 1 and 2 in step 18"
    )
    assert ("failed", said) == (flipped.status, flipped.failure.message)
    failure = flipped.details["failure"]
    assert ("replicas_differ", 0, "localhost", 18) == tuple(failure[key] for key in ("class", "rank", "host", "step"))
    folder = here / "runs" / flipped.run_id / "checkpoints"
    complete = {path.name for path in folder.iterdir() if not path.name.endswith(contract.UNFINISHED_SUFFIX)}
    assert {"step-4", "step-8", "step-12", "step-16"} == complete

    (recipe / "flip.txt").unlink()
    resumed, undisturbed = run(3, resume=flipped.run_id), run(2)
    assert ("done", 16) == (resumed.status, resumed.details["began_from"]["step"])
    assert undisturbed.parameters_sha256 == resumed.parameters_sha256


SHELL = """
ttlaunch() {
  case "$1" in
    run | chaos) "$PYTHON" -m ttlaunch "$@" $SMALL ;;
    *) "$PYTHON" -m ttlaunch "$@" ;;
  esac
}
"""


def test_the_demonstration_of_the_readme_names_the_rank_with_the_flipped_bit_and_the_line_that_was_changed(here):
    """The README's commands are run as they are typed there, with a smaller model and fewer steps."""
    text = (RECIPES.parent / "README.md").read_text(encoding="utf-8")
    typed = text.partition("<!-- proof-commands -->")[2].split("```")[1].removeprefix("sh\n")
    *commands, bisect = typed.splitlines()
    keys = KEYS | {"training_config.steps": 28, "training_config.verify_interval": 13}
    small = " ".join([*FORKED, *(f"--set {key}={value}" for key, value in keys.items())])
    variables = {**os.environ, "PYTHON": sys.executable, "SMALL": small, "NO_COLOR": "1"}

    def type_in(script):
        command = ["bash", "-euo", "pipefail", "-c", SHELL + script]
        return subprocess.run(command, cwd=here, env=variables, capture_output=True, text=True, check=False)

    answer = type_in("\n".join(commands))
    assert 0 == answer.returncode, answer.stderr
    assert "R009: rank 1 (worker, localhost) had other bits in" in answer.stdout

    found = type_in(bisect)
    assert 1 == found.returncode, found.stderr
    changed = (here / "recipes/data_parallel/trainer.py").read_text(encoding="utf-8").splitlines()
    line = next(number for number, code in enumerate(changed, 1) if "x_BT.roll(1)" in code)
    assert "first difference step 25: what embedding makes of micro-batch 2" in found.stdout
    assert f"code: trainer.py:{line}: " in found.stdout
    assert "cause            code" in found.stdout
