"""Recipes whose workers drift apart, with real ranks: bounds under real timing, and the bits of a simulation."""

import pytest

from tests.runtime.layouts import train_recipe
from ttlaunch import contract
from ttlaunch.running.readers.recorded import read_run

pytestmark = pytest.mark.mpi

SMALL = {
    "training_config": {"steps": 12, "batch_size": 7, "micro_batch_size": 1, "validation_interval": 8}
    | {"validation_sequences": 4},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 32, "max_sequence_length": 16},
    "checkpoint_config": {"interval": None},
}


def settled(found):
    """The bytes of a run against its formula."""
    (found.run_dir / contract.REPORT_FILE).write_text('{"status": "done"}')
    return read_run(found.run_dir).traffic


@pytest.mark.parametrize("sends", ["buffered", "synchronous"])
def test_workers_that_lead_end_with_equal_weights(run_ranks, sends):
    """D4, D6: whoever is quicker; also where a send ends only when its receive has begun, which shows a circle of waits."""
    environment = {"TTLAUNCH_SYNCHRONOUS_SENDS": "1"} if sends == "synchronous" else {}
    config = SMALL | {"classic_dp_config": {"staleness_bound": 3}}
    found = run_ranks("classic_dp", ["worker"] * 3, config, environment=environment)
    assert 0 == found.process.returncode, found.output
    assert found.sha256  # fails unless all three hold the same parameters
    results = {name: value for record in found.records(0, "result") for name, value in record["values"].items()}
    assert 0 <= results["staleness maximum"] <= 3
    assert 0 <= results["stale gradients"] <= results["gradients"] == 36
    traffic = settled(found)
    assert (None, 12, 3) == (traffic.reason, traffic.steps, traffic.validations)
    assert [] == [edge for edge in traffic.edges if edge.size != edge.expected]


def test_a_bound_of_zero_is_one_process(run_ranks, tmp_path):
    """D4: with real messages, in buckets."""
    config = SMALL | {"classic_dp_config": {"staleness_bound": 0}}
    expected = train_recipe("classic_dp", ["trainer"], tmp_path / "run", config, data=None)
    found = run_ranks("classic_dp", ["worker"] * 3, config)
    assert expected.sha256 == found.sha256


@pytest.mark.parametrize(
    ("recipe", "section"),
    [
        ("local_sgd", {"local_sgd_config": {"every": 5}}),
        ("diloco", {"diloco_config": {"every": 5}, "compression_config": {"kind": "int8"}}),
    ],
    ids=["local_sgd", "diloco"],
)
def test_local_steps_have_the_bits_of_a_simulation(run_ranks, tmp_path, recipe, section):
    """12 steps are no multiple of 5, so the last average is an uneven one; D8: one of them through a codec."""
    expected = train_recipe(recipe, ["worker"] * 3, tmp_path / "run", SMALL | section, data=None)
    found = run_ranks(recipe, ["worker"] * 3, SMALL | section)
    assert 0 == found.process.returncode, found.output
    assert expected.sha256 == found.sha256
    traffic = settled(found)
    assert [] == [edge for edge in traffic.edges if edge.size != edge.expected]
    moved = "differences" if "compression_config" in section else "weights"
    assert moved in {edge.operation for edge in traffic.edges}
