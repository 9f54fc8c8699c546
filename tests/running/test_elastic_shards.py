"""A run of `zero` from which an owner and its shadow are killed together, and what goes on from its newest checkpoint."""

import json
import os
import signal
import subprocess
from itertools import permutations

import pytest

from tests.running.test_elastic_runs import COMMAND, MOST_S, SET, running
from ttlaunch import contract
from ttlaunch.membership.slots import divide_slots
from ttlaunch.running.checkpoints.complete import newest_step

pytestmark = pytest.mark.mpi

CHECKPOINTS = ["--set", "checkpoint_config.interval=4"]


def trained_alone(here):
    command = [*COMMAND, "zero", *SET, "-n", "1", "--format", "json", "--runs-dir", str(here / "one")]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True)
    return json.loads(done.stdout)["parameters_sha256"]


def holders(folder, step, *, ranks=4):
    """The ranks that have reported a digest of each tensor of optimizer state after a step."""
    found = {}
    for rank in range(ranks):
        records = map(contract.read_record, (folder / contract.progress_file(rank)).read_bytes().splitlines())
        names = []
        for record in (one for one in records if one and one["kind"] == contract.KIND_DIGESTS):
            names = record.get("names", names)
            for name in names if record["step"] == step else ():
                if name.startswith(f"{contract.OPTIMIZER_PREFIX}mean."):
                    found.setdefault(name, set()).add(rank)
    return found


def test_an_owner_killed_with_its_shadow_ends_the_run_by_name_and_another_number_of_workers_resumes_it(here):
    expected = trained_alone(here)
    shadow = divide_slots(["localhost"] * 4).shadows[1]
    with running(here, *CHECKPOINTS, recipe="zero", ranks=4, elastic="1:4") as run:
        run.until(lambda: run.step() >= 9)
        for victim in (1, shadow):
            os.kill(run.pid(victim), signal.SIGKILL)
        report = run.report()
        folder = run.folder
    compared = holders(folder, 4)  # by the launcher, which ends a run whose copies differ
    assert {2} == {len(ranks) for ranks in compared.values()}
    assert {(rank, divide_slots(["localhost"] * 4).shadows[rank]) for rank in range(4)} <= {
        pair for ranks in compared.values() for pair in permutations(ranks)
    }
    assert ("failed", "R075") == (report["status"], report["failure"]["code"])
    assert "the worker that owned it and its shadow" in report["failure"]["cause"]
    assert "--resume" in report["failure"]["next_step"]
    assert newest_step(folder) >= 8
    command = ["--resume", folder.name]
    resumed = [
        *COMMAND,
        "zero",
        *SET,
        *CHECKPOINTS,
        "-n",
        "3",
        "--elastic",
        "1:3",
        "--warm",
        *command,
        "--format",
        "json",
    ]
    done = subprocess.run(resumed, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True)
    assert expected == json.loads(done.stdout)["parameters_sha256"]
