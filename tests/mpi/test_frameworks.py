"""Runs of scripts written for torchrun and its frameworks, on one machine: at once, failing, and restarted."""

import importlib.util
import json
import os
import subprocess
import sys
import time

import pytest

from tests.scripts.launches import FOLDER, losses_by_torchrun, losses_in, start_two_at_once

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
LONGEST_S = 20
"""From the exception to the end of the command: at most 2 s on an idle machine, far longer where several tests share two cores."""


def run(folder, *words):
    """How a run of two ranks ended, and the failure in its newest report."""
    command = [sys.executable, "-m", "ttlaunch", "run", "-n", "2", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    return done, json.loads(max(folder.glob("runs/*/report.json"), key=os.path.getmtime).read_text())["failure"]


@pytest.fixture(scope="module")
def two_at_once(tmp_path_factory):
    """What two runs of one script printed that were started at the same time."""
    return start_two_at_once(tmp_path_factory.mktemp("two"))


def test_two_runs_at_once_do_not_disturb_each_other(two_at_once):
    """E17; `benchmarks/frameworks.py` starts them ten times."""
    first, second = two_at_once
    assert first is not None
    assert first == second


@pytest.mark.parametrize(
    ("script", "package", "line"),
    [
        ("ddp", "torch", 'raise ValueError(f"sample {index} is corrupt")'),
        ("fsdp2", "torch", "return x + self.down(torch.relu(self.up(x)))"),
        ("accelerated", "accelerate", 'raise ValueError("a sample is not a number")'),
        ("fabric", "lightning", "return self.layers(x)"),
        ("lightning_trainer", "lightning", 'raise ValueError("this batch cannot be used")'),
    ],
)
def test_a_rank_that_raises_inside_a_framework_is_named_with_the_line_of_its_script(
    here, skip_or_fail, script, package, line
):
    """E18."""
    if importlib.util.find_spec(package) is None:
        skip_or_fail(f"{package} is not installed")
    done, failure = run(here, str(FOLDER / f"{script}.py"), "--", "--bad-rank", "1")
    seconds = time.time() - failure["time"]
    assert 1 == done.returncode
    lines = (FOLDER / f"{script}.py").read_text().splitlines()
    place = f"{FOLDER / script}.py:{[text.strip() for text in lines].index(line) + 1}"
    assert ("R002", 1, place) == (failure["code"], failure["rank"], failure["place"])
    assert [0] == [other["rank"] for other in failure["cascade"] if other["rank"] != 1] or not failure["cascade"]
    assert 1 == done.stderr.count("error[R")
    assert f"{line}\n" in done.stderr[done.stderr.index("error[R002]: rank 1 ") :]
    assert (script in {"fsdp2", "fabric"}) is any("raised at torch/nn/" in fact for fact in failure["evidence"])
    assert seconds <= LONGEST_S


@pytest.mark.parametrize("script", ["ddp", "lightning_trainer"])
def test_a_script_goes_on_from_its_own_checkpoint_after_a_restart(here, two_at_once, skip_or_fail, script):
    """E18."""
    if script == "lightning_trainer" and importlib.util.find_spec("lightning") is None:
        skip_or_fail("lightning is not installed")
    path = str(FOLDER / f"{script}.py")
    number, *expected = (two_at_once[0] if script == "ddp" else losses_by_torchrun(path, here)).split()
    done, failure = run(here, "--max-restarts", "1", path, "--", "--bad-rank", "1", "--folder", "kept")
    assert (0, None) == (done.returncode, failure), done.stdout + done.stderr
    assert 1 == done.stderr.count("error[R002]"), done.stderr
    assert [number, *expected[len(expected) // 2 :]] == losses_in(done.stdout).split()
