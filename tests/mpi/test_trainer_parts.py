"""Trainer parts with real ranks, all at once: fp16, recomputed activations, masks of responses, early stop, layer norms.

Each part is tested alone, in all layouts, in `tests/runtime`; here it is MPI that moves what ranks agree on.
"""

import math

import pytest

pytestmark = pytest.mark.mpi

LAYOUTS = {
    "three tiers": ("hierarchical_parallel", ["worker"] * 3 + ["aggregator", "optimizer"]),
    "data parallel": ("data_parallel", ["worker"] * 3),
    "pipeline": ("pipeline_parallel", ["stage"] * 2),
}


def config(*, reduction=None, blocks=None, **training):
    parts = {
        "training_config": {"steps": 60, "batch_size": 6, "micro_batch_size": 1, "validation_interval": 4, "seed": 2}
        | {"validation_sequences": 6, "learning_rate": 0.1, "precision": "fp16", "activation_checkpointing": True}
        | {"response_template": "[A]", "instruction_template": "[Q]", "log_layer_grad_norms": True}
        | {"early_stop_patience": 3, "early_stop_min_delta": 0.3}
        | training,
        "loss_scale_config": {"initial_power": 14, "growth_interval": 5},
        "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
        | {"dropout_prob": 0.1},
        "checkpoint_config": {"interval": None},
    }
    if reduction:
        parts["data_parallel_config"] = {"reduction": reduction}
    if blocks:
        parts["multihost_config"] = {"pipeline_parallel_config": {"blocks_per_rank": blocks}}
    return parts


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "talk.txt"
    path.write_text("".join(f"[Q]{'why ' * (turn % 37)}[A]because {turn}\n" for turn in range(300)))
    return path


@pytest.fixture(scope="module")
def alone(run_ranks, talk):
    run = run_ranks("hierarchical_parallel", ["trainer"], config(), data=talk)
    assert run.process.returncode == 0, run.output
    return run


def results(run, name):
    return {record["values"][name] for record in run.all_records("result") if name in record["values"]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_parts_together_have_the_bits_of_one_process(run_ranks, alone, talk, layout):
    recipe, roles = LAYOUTS[layout]
    found = run_ranks(recipe, roles, config(blocks=[1, 1] if layout == "pipeline" else None), data=talk)
    assert found.process.returncode == 0, found.output
    assert alone.sha256 == found.sha256
    assert results(alone, "stopped early") == results(found, "stopped early")
    assert results(alone, "skipped steps") == results(found, "skipped steps")
    norms = [{layer for r in run.all_records("layer_grad_norms") for layer in r["norms"]} for run in (alone, found)]
    assert {"embedding", "blocks.0", "blocks.1", "head"} == norms[0] == norms[1]


def test_the_reference_did_skip_and_stop_early(alone):
    (reason,) = results(alone, "stopped early")
    assert reason.endswith("the validation loss has not fallen by 0.3 or more in 3 validations")
    assert len(alone.records(0, "step")) < 60
    assert 0 < max(results(alone, "skipped steps")) < len(alone.records(0, "step"))


def test_torchs_reduction_skips_overflows_too(run_ranks, talk):
    """`fast` differs by rounding, so only what it does is compared: skips, and losses of steps without dropout."""
    keys = {"steps": 12, "learning_rate": 5e-3, "early_stop_patience": None}
    fast = run_ranks("data_parallel", ["worker"] * 3, config(reduction="fast", **keys), data=talk)
    exact = run_ranks("data_parallel", ["worker"] * 3, config(reduction="canonical", **keys), data=talk)
    assert (0, 0) == (fast.process.returncode, exact.process.returncode), fast.output + exact.output
    norms = [[record["grad_norm"] for record in run.records(0, "step")] for run in (fast, exact)]
    assert [math.isfinite(norm) for norm in norms[1]] == [math.isfinite(norm) for norm in norms[0]]
    assert results(exact, "skipped steps") == results(fast, "skipped steps")
    losses = [[record["loss"] for record in run.records(0, "step")] for run in (fast, exact)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
