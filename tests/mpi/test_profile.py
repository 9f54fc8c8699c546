"""A real run under torch's profiler: every rank leaves a trace that names collectives, ours and torch's own (E7)."""

import gzip
import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.forked import FORKED
from ttlaunch.profiling import profile_file

TINY = ["training_config.steps=4", "training_config.validation_sequences=2", "transformer_config.embedding_dim=16"]
TINY += ["transformer_config.max_sequence_length=16", "scheduler_config.warmup_steps=1"]
TINY += ["data_parallel_config.reduction=fast"]


def ttlaunch(*words):
    return subprocess.run(
        [sys.executable, "-m", "ttlaunch", *words], capture_output=True, text=True, timeout=200, check=True
    ).stdout


@pytest.mark.mpi
def test_the_traces_of_a_run_name_its_collectives(here):
    """E7, E8, E1: also how often: torch adds up once a step, and not after each of a worker's four micro-batches."""
    words = ["run", "data_parallel", "--profile-steps", "2-3", *(word for one in TINY for word in ("--set", one))]
    answer = subprocess.run(
        [sys.executable, "-m", "ttlaunch", *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert (0, "") == (answer.returncode, answer.stderr)
    assert "  torch's profile  runs/" in answer.stdout
    (run,) = (here / "runs").glob("20*")
    for rank in range(2):
        content = json.loads(gzip.decompress((run / profile_file(rank)).read_bytes()))
        found = Counter(event["name"] for event in content["traceEvents"] if event.get("ph") == "X")
        assert {"step 2", "step 3", "gloo:all_reduce", "wait all_reduce", "isend all_reduce"} <= found.keys()
        assert {"step 1", "step 4"} & found.keys() == set()
        assert 2 == found["gloo:all_reduce"]  # the model is one bucket
    memory = json.loads(ttlaunch("report", "--format", "json"))["memory"]
    assert [(0, 4), (1, 4)] == [(one["rank"], one["step"]) for one in memory]
    assert "memory of tensors in step 4, MB: the most of each at any moment" in ttlaunch("report")
    assert ["memory", "memory"] == [
        line.split("\t")[0] for line in ttlaunch("report", "--format", "concise").splitlines()[-2:]
    ]


@pytest.mark.mpi
def test_what_ranks_measure_is_what_was_predicted_from_the_plan(here):
    """E9: of a rank that adds up gradients and of one that updates, too; and of the bytes between all of them."""
    words = [word for one in TINY[:-1] for word in ("--set", one)]
    ttlaunch("run", "hierarchical_parallel", "--profile-steps", "1", *FORKED, *words)

    verdict = json.loads(ttlaunch("report", "--format", "json"))["verdict"]
    assert (None, []) == (verdict["not_predicted"], verdict["notes"])
    assert verdict["bytes"]["predicted"] == verdict["bytes"]["measured"] > 0
    assert [(rank, "tensors") for rank in range(4)] == [(one["rank"], one["of"]) for one in verdict["memory"]]
    assert max(abs(one["error"]) for one in verdict["memory"]) < 0.01
