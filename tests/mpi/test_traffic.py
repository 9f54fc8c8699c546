"""TrafficCounter ÷ formula with real ranks, over every kind of comm, and what ranks say they waited for."""

import pytest

from ttlaunch import contract
from ttlaunch.running.metrics.times import step_times
from ttlaunch.running.readers.recorded import read_run

pytestmark = pytest.mark.mpi

SMALL = {
    "training_config": {"steps": 5, "batch_size": 6, "micro_batch_size": 1, "validation_interval": 3}
    | {"validation_sequences": 4},
    "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 16, "max_sequence_length": 16},
}


@pytest.fixture
def recorded(run_ranks):
    """`recorded(recipe, roles, …)` runs it and reads what `ttlaunch report` would."""

    def run(recipe, roles, **sections):
        found = run_ranks(recipe, roles, SMALL | sections)
        assert found.process.returncode == 0, found.output
        (found.run_dir / contract.REPORT_FILE).write_text('{"status": "done"}')
        return read_run(found.run_dir)

    return run


def check_exact(traffic):
    """Every operation and edge moved what the formula says, to the byte."""
    assert (None, 5, 3) == (traffic.reason, traffic.steps, traffic.validations)
    assert traffic.edges
    assert [] == [edge for edge in traffic.edges if edge.size not in {None, edge.expected}]


@pytest.mark.parametrize("socket_type", ["mpi", "fabric"])
def test_tiers_move_what_they_say_over_real_transports(recorded, socket_type):
    roles = ["worker"] * 2 + ["aggregator", "optimizer"]
    check_exact(recorded("hierarchical_parallel", roles, multihost_config={"socket_type": socket_type}).traffic)


def test_what_torch_sends_is_not_measured(recorded):
    traffic = recorded("data_parallel", ["worker"] * 3, data_parallel_config={"reduction": "fast"}).traffic
    check_exact(traffic)
    hidden = [(edge.operation, edge.source, edge.dest) for edge in traffic.edges if edge.size is None]
    assert [("gradients (torch)", 0, 1), ("gradients (torch)", 1, 2), ("gradients (torch)", 2, 0)] == hidden


def test_waiting_is_a_part_of_the_step(recorded):
    run = recorded(
        "pipeline_parallel", ["stage"] * 2, multihost_config={"pipeline_parallel_config": {"blocks_per_rank": [1, 1]}}
    )
    check_exact(run.traffic)
    arrives = ["activation_gradients", "activations"]
    for entry, waited_for in zip(run.telemetry, arrives, strict=True):
        times = step_times([entry])
        assert 0 < times.step.median <= times.step.p90
        assert {"forward", "backward", "update", "exchange"} == {phase.name for phase in times.phases}
        assert 0.99 < sum(phase.share for phase in times.phases) < 1.01
        assert {waited_for, "squared_norms"} <= {wait.name for wait in times.waits}
        assert 0 < sum(wait.share for wait in times.waits) < 1
