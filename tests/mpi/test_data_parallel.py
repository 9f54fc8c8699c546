"""Data parallelism with real ranks on data that are drawn: canonical against one process bit for bit, torch's own within
rounding (E1)."""

import math

import pytest

pytestmark = pytest.mark.mpi

STEPS, BRANCHING = 30, 2


def small(*, reduction="canonical", **training):
    return {
        "training_config": {"steps": STEPS, "batch_size": 6, "micro_batch_size": 1, "validation_interval": 20}
        | {"gradient_accumulation_steps": 2, "validation_sequences": 5, "learning_rate": 5e-3}
        | training,
        "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
        | {"dropout_prob": 0.1},
        "scheduler_config": {"type": "cosine", "warmup_steps": 5},
        "data_config": {"source": "markov", "vocabulary": 8, "branching": BRANCHING},
        "data_parallel_config": {"reduction": reduction},
        "checkpoint_config": {"interval": None},
    }


@pytest.fixture(scope="module")
def alone(run_ranks):
    run = run_ranks("data_parallel", ["trainer"], small())
    assert run.process.returncode == 0, run.output
    return run


def reported(run, kind, key):
    return {record["step"]: record[key] for record in run.records(0, kind) if key in record}


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.core
def test_workers_equal_one_process(run_ranks, alone, workers):
    """The spine: parameters, losses, norms and validations, with ragged blocks, dropout, clipping and accumulation."""
    run = run_ranks("data_parallel", ["worker"] * workers, small())
    assert run.process.returncode == 0, run.output
    assert alone.sha256 == run.sha256
    for kind, keys in (("step", ("loss", "tokens", "grad_norm", "learning_rate")), ("validation", ("loss", "tokens"))):
        for key in keys:
            assert reported(alone, kind, key) == reported(run, kind, key)
    assert [0, 20, STEPS] == list(reported(run, "validation", "loss"))
    assert math.log(BRANCHING) < reported(run, "validation", "loss")[STEPS] < 0.8 * math.log(8)


def test_no_worker_relies_on_buffered_sends(run_ranks, alone):
    """And three workers, too, equal one process."""
    run = run_ranks(
        "data_parallel", ["worker"] * 3, small(), environment={"TTLAUNCH_SYNCHRONOUS_SENDS": "1"}, timeout_s=100
    )
    assert run.process.returncode == 0, run.output
    assert alone.sha256 == run.sha256


def test_torchs_reduction_trains_the_same_model_up_to_rounding(run_ranks, alone):
    """E1: each step's loss is that of the canonical run within what 30 steps of Adam make of rounding; 3 workers have
    unequal blocks, so a mean over workers instead of over tokens would show in the first step."""
    run = run_ranks("data_parallel", ["worker"] * 3, small(reduction="fast"))
    assert run.process.returncode == 0, run.output
    assert run.sha256
    expected, found = reported(alone, "step", "loss"), reported(run, "step", "loss")
    assert expected[1] == pytest.approx(found[1], rel=1e-6)
    assert list(expected) == list(found)
    assert list(expected.values()) == pytest.approx(list(found.values()), rel=2e-3)
    norms = reported(alone, "step", "grad_norm"), reported(run, "step", "grad_norm")
    assert norms[0][1] == pytest.approx(norms[1][1], rel=1e-5)
