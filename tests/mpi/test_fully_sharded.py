"""Fully sharded data parallelism with real ranks: one process's losses up to rounding, memory and bytes as the formulas say,
and checkpoints that any layout reads and that are read in any layout (E1-E4). The data are drawn."""

import json
import math

import pytest

from tests.runtime.layouts import train, train_recipe
from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.checkpoints.resume import verify
from ttlaunch.running.checkpoints.tensor_difference import largest_difference, read_weights
from ttlaunch.running.readers.recorded import read_run

pytestmark = pytest.mark.mpi

STEPS, HALF, VOCABULARY = 8, 4, 8
ROUNDING = 1e-5
"""Of a loss in float32, relative: torch adds gradients in another order, and Adam makes more of the last bits."""


def small(*, shard="all", replicas=1, tied=False, initial_power=8, **training):
    """12 micro-batches of 1 sequence, 5 of a validation: unequal blocks on 3 workers, and on 4 in a validation."""
    return {
        "training_config": {"steps": STEPS, "batch_size": 6, "micro_batch_size": 1, "validation_interval": HALF}
        | {"gradient_accumulation_steps": 2, "validation_sequences": 5, "learning_rate": 5e-3}
        | training,
        "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16}
        | {"dropout_prob": 0.1, "tie_embeddings": tied},
        "scheduler_config": {"type": "cosine", "warmup_steps": 2},
        "data_config": {"source": "markov", "vocabulary": VOCABULARY, "branching": 2},
        "fully_sharded_config": {"shard": shard, "replicas": replicas},
        "checkpoint_config": {"interval": HALF},
        "loss_scale_config": {"initial_power": initial_power},
    }


@pytest.fixture(scope="module")
def sharded(run_ranks):
    """`sharded(workers, …)` runs to the end; once for the same arguments."""
    found = {}

    def run(workers, *, start=None, **options):
        key = json.dumps([workers, options, start])
        if key not in found:
            found[key] = run_ranks("fully_sharded", ["worker"] * workers, small(**options), start=start, timeout_s=240)
            assert found[key].process.returncode == 0, found[key].output
        return found[key]

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """`alone(…)`: one process, and what it kept halfway; once for the same arguments."""
    found = {}

    def run(**training):
        key = json.dumps(training)
        if key not in found:
            config = {name: value for name, value in small(**training).items() if name != "fully_sharded_config"}
            folder = tmp_path_factory.mktemp("alone") / "run"
            found[key] = train("single", folder, config, data=None, saves=True), config
        return found[key]

    return run


def start_of(run_dir, step):
    """What a plan says of a run's checkpoint."""
    plan = {"hash": "h", "recipe": {"name": "r"}, "layout": "l", "world_size": 64, "config": {}, "data": None}
    complete_checkpoints(run_dir, plan, run_id="run")
    checkpoint = verify(run_dir / contract.checkpoint_dir(step))
    files = [{"path": str(checkpoint.path / name)} | entry for name, entry in checkpoint.manifest["files"].items()]
    state = checkpoint.manifest["state"]
    return {"origin": str(checkpoint.path), "step": checkpoint.step, "state": state, "files": files}


def losses(run, kind="step", key="loss"):
    records = run.records(0, kind) if hasattr(run, "roles") else run.records(kind)
    return {record["step"]: record[key] for record in records if key in record}


LAYOUTS = pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {"shard": "all", "activation_checkpointing": True, "tied": True}),
        (3, {"shard": "optimizer+gradients"}),
        (4, {"shard": "all", "replicas": 2}),
    ],
    ids=str,
)


@LAYOUTS
def test_the_losses_are_those_of_one_process(sharded, alone, workers, options):
    """E1, E2, E3, E13: with dropout, clipping, accumulation and blocks of unequal length; norms as in other recipes (D24)."""
    found, (expected, _) = sharded(workers, **options), alone(tied=options.get("tied", False))
    for kind, keys in (("step", ("loss", "grad_norm", "learning_rate")), ("validation", ("loss",))):
        for key in keys:
            assert losses(expected, kind, key) == pytest.approx(losses(found, kind, key), rel=ROUNDING)
    assert losses(expected, "step", "tokens") == losses(found, "step", "tokens")
    assert losses(found, "validation")[STEPS] < 0.98 * losses(found, "validation")[0]
    assert found.digests.keys() == expected.records("parameters")[0]["digests"].keys()


def test_the_naive_form_has_the_same_losses_up_to_rounding(sharded, tmp_path):
    options = {"shard": "optimizer+gradients"}
    fast, roles = sharded(3, **options), ["worker"] * 3
    naive = train_recipe("fully_sharded", roles, tmp_path / "naive", small(**options), data=None, trainer="naive")
    for key in ("loss", "grad_norm", "learning_rate"):
        assert losses(fast, "step", key) == pytest.approx(losses(naive, "step", key), rel=ROUNDING)


@LAYOUTS
def test_it_moves_and_keeps_what_the_formulas_say(sharded, workers, options):
    """D1, E1: 16/n bytes a parameter as measured; every collective of torch's that was made, and no other."""
    found = sharded(workers, **options)
    (found.run_dir / contract.REPORT_FILE).write_text('{"status": "done"}')
    traffic = read_run(found.run_dir).traffic
    assert (None, STEPS, 3) == (traffic.reason, traffic.steps, traffic.validations)
    assert [] == [edge for edge in traffic.edges if edge.size != edge.expected]
    torchs = {edge.operation for edge in traffic.edges if "torch" in edge.operation}
    copies = {"replicas (torch)"} if "replicas" in options else set()
    assert {"weights (torch)", "gradients (torch)"} | copies == torchs
    ranks = workers // options.get("replicas", 1)
    each = [value for record in found.all_records("result") for value in record["values"].values()]
    assert workers == len(each)
    values = sum(math.prod(one.shape) for one in read_weights(kept(found, STEPS)).values())
    unused = (
        4 * VOCABULARY * 16 / values if "tied" in options else 0
    )  # where the gradient of the matrix's second use is gathered
    assert 16 + unused <= sum(each[:ranks]) < 16 * 1.05 + unused  # some lies idle where rows cannot be shared evenly
    assert max(each) < (16 * 1.1 + unused) / ranks


def kept(run, step):
    start_of(run.run_dir, step)
    return run.run_dir / contract.checkpoint_dir(step)


@pytest.mark.parametrize(
    ("workers", "options"), [(3, {"shard": "optimizer+gradients"}), (4, {"shard": "all", "replicas": 2})]
)
def test_pieces_of_a_checkpoint_join_to_the_weights_that_the_ranks_had(sharded, alone, workers, options, tmp_path):
    found = sharded(workers, **options)
    joined = train("single", tmp_path / "run", alone()[1], data=None, start=start_of(found.run_dir, STEPS))
    assert found.sha256 == joined.sha256
    weights = read_weights(kept(found, STEPS))
    assert 0 < largest_difference(weights, read_weights(kept(alone()[0], STEPS))) < 1e-3


def test_one_process_goes_on_from_rows(sharded, alone, tmp_path):
    """E3, E11: a checkpoint of 3 workers in one process."""
    before = sharded(3, shard="optimizer+gradients")
    after = train("single", tmp_path / "run", alone()[1], data=None, start=start_of(before.run_dir, HALF))
    expected = {step: loss for step, loss in losses(before).items() if step > HALF}
    assert expected == pytest.approx(losses(after), rel=ROUNDING)


def test_rows_go_on_from_one_process(sharded, alone):
    """E3, E11: a checkpoint of one process in 2 workers; no step is done twice."""
    expected = {step: loss for step, loss in losses(alone()[0]).items() if step > HALF}
    found = sharded(2, start=start_of(alone()[0].run_dir, HALF))
    assert expected == pytest.approx(losses(found), rel=ROUNDING)


def test_workers_go_on_to_the_bits_of_a_run_that_nobody_interrupted(sharded):
    """E11: torch adds in an order that depends on the number of workers, and on nothing else."""
    whole = sharded(3, shard="optimizer+gradients")
    found = sharded(3, shard="optimizer+gradients", start=start_of(whole.run_dir, HALF))
    assert {step: loss for step, loss in losses(whole).items() if step > HALF} == losses(found)
    assert whole.sha256 == found.sha256


def test_lower_precision_trains_too(sharded, alone):
    """E12: weights travel in half the bytes, gradients are added in float32; bfloat16 has 8 bits, so losses differ by less than 1 %."""
    found, (expected, _) = sharded(2, precision="bf16"), alone()
    assert losses(expected) == pytest.approx(losses(found), rel=0.01)
    bytes_of = {}
    for run in (found, sharded(2, start=start_of(alone()[0].run_dir, HALF))):
        (run.run_dir / contract.REPORT_FILE).write_text('{"status": "done"}')
        edges = read_run(run.run_dir).traffic.edges
        assert [] == [edge for edge in edges if edge.size != edge.expected]
        bytes_of[run] = {edge.operation: edge.size for edge in edges}
    half, whole = bytes_of.values()  # the one of 8 steps, the other of the last 4
    assert half["gradients (torch)"] == 2 * whole["gradients (torch)"]
    assert 0.9 < half["weights (torch)"] / whole["weights (torch)"] < 1  # and 3 validations at half, 2 whole


def test_an_overflow_is_skipped_by_all(sharded):
    """E12: with a scale that gradients do not survive; all workers skip the same steps, then training goes on."""
    found = sharded(2, precision="fp16", initial_power=14)
    said = [record["values"] for record in found.all_records("result")]
    skipped = [values["skipped steps"] for values in said if "skipped steps" in values]
    count = max(skipped)
    assert [*range(1, count + 1)] * 2 == skipped
    assert 0 < count < STEPS
    assert losses(found, "validation")[STEPS] < losses(found, "validation")[0]
    assert found.sha256
