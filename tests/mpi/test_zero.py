"""ZeRO with real ranks under mpirun, against one process."""

import json

import pytest

from ttlaunch import contract
from ttlaunch.profiling import ENV_PROFILE_STEPS

pytestmark = pytest.mark.mpi

STEPS = 30


def small(*, zero_stage=None, steps=STEPS):
    config = {
        "training_config": {"steps": steps, "batch_size": 6, "micro_batch_size": 1, "validation_interval": 20}
        | {"gradient_accumulation_steps": 2, "validation_sequences": 5, "learning_rate": 5e-3},
        "transformer_config": {"num_blocks": 4, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
        | {"dropout_prob": 0.1},
        "scheduler_config": {"type": "cosine", "warmup_steps": 5},
    }
    return config if zero_stage is None else config | {"zero_config": {"stage": zero_stage}}


def by_step(run, kind, key):
    return {record["step"]: record[key] for record in run.all_records(kind) if key in record}


@pytest.mark.parametrize(("workers", "zero_stage"), [(2, 3), (3, 1)])
def test_workers_train_to_the_bits_of_one_process(run_ranks, workers, zero_stage):
    """C7, C14, C15, D2: 30 steps, end to end; every loss, norm and validation, and the parameters at the end.

    Also with steps that torch's profiler records, and one in which memory is counted.
    """
    expected = run_ranks("zero", ["trainer"], small())
    environment = {ENV_PROFILE_STEPS: "10"} if zero_stage == 3 else {}
    found = run_ranks("zero", ["worker"] * workers, small(zero_stage=zero_stage), environment=environment)
    assert found.process.returncode == 0, found.output
    assert [contract.KIND_DONE] * workers == [record["kind"] for record in found.all_records(contract.KIND_DONE)]
    assert expected.sha256 == found.sha256
    for key in ("loss", "tokens", "grad_norm", "learning_rate"):
        assert by_step(expected, contract.KIND_STEP, key) == by_step(found, contract.KIND_STEP, key)
    losses = by_step(found, contract.KIND_VALIDATION, "loss")
    assert by_step(expected, contract.KIND_VALIDATION, "loss") == losses
    assert losses[STEPS] < 0.8 * losses[0]
    if zero_stage == 3:
        check_memory(found)


EMBEDDING, BLOCK, HEAD = (256 + 16) * 16, 12 * 16**2 + 13 * 16, 256 * 16 + 2 * 16
"""Values of a layer; layers of even and of odd places take turns: embedding, four blocks, head."""


def check_memory(run):
    """D1, D3: at no moment of a step has a rank more parameters than its shard and two layers, of gradients likewise."""
    for rank in range(len(run.roles)):
        lines = (run.run_dir / contract.traffic_file(rank)).read_text().splitlines()
        facts = json.loads(lines[-1])["facts"]
        shard, two_layers = 4 * facts["owned_values"], 4 * (max(EMBEDDING, BLOCK) + max(BLOCK, HEAD))
        values = [record["values"] for record in run.records(rank, "result")]
        (buffers,) = [float(one[name].split()[0]) * 1e6 for one in values for name in one if name.startswith("buffers")]
        kept = facts["memory_gradients"] + facts["memory_buffers"]
        assert 11 == facts["memory_step"]
        assert shard + two_layers == facts["memory_parameters"]
        assert shard < kept < shard + buffers - two_layers + 10_000  # what was reported, and some small tensors
        assert facts["memory_parameters"] + kept + facts["memory_optimizer"] < facts["memory_peak"]


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_no_stage_relies_on_buffered_sends(run_ranks, zero_stage):
    """C7: with synchronous sends a hidden deadlock is a visible one."""
    environment = {"TTLAUNCH_SYNCHRONOUS_SENDS": "1"}
    config = small(zero_stage=zero_stage, steps=6)
    run = run_ranks("zero", ["worker"] * 3, config, environment=environment, timeout_s=60)
    assert run.process.returncode == 0, run.output
