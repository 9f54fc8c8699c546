"""Workers of an elastic run as real processes, with the coordinator's real state machine in the test."""

import pytest

from .elastic_runs import ElasticRun, in_one_process, losses_of

STEPS = 12
CONFIG = {
    "training_config": {"steps": STEPS, "validation_interval": 4, "micro_batch_size": 2},
    "transformer_config": {"num_blocks": 1},
    "multihost_config": {"socket_type": "grpc"},
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The digest of the parameters that one process trains, and its losses."""
    return in_one_process(tmp_path_factory.mktemp("alone") / "run", CONFIG)


@pytest.fixture
def begin(tmp_path):
    runs = []

    def make(**options):
        runs.append(ElasticRun(tmp_path, CONFIG, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def check(run, expected, *, finished):
    """All that finished have the parameters of one process, and every step was reported with its loss."""
    digest, losses = expected
    assert dict.fromkeys(finished, 0) == {number: run.statuses[number] for number in finished}
    assert {digest} == {run.digest(number) for number in finished}
    found = {}
    for records in run.records.values():
        found |= losses_of(records)
    assert losses == losses | found


def test_workers_that_nothing_happens_to_train_to_the_bits_of_one_process(begin, expected):
    run = begin(first=3).finish()
    check(run, expected, finished=[0, 1, 2])
    assert {(0, 1, 2)} == {begin.numbers for begin in run.epochs}  # a loaded machine divides the work anew
    assert expected[1] == losses_of(run.records[0])
