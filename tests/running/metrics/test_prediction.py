"""A prediction read back, and how far a run was from it (E9)."""

import json

import pytest

from ttlaunch.running.metrics.prediction import judge, read_prediction
from ttlaunch.running.metrics.telemetry import RankMemory
from ttlaunch.running.metrics.traffic import Edge, Settlement

MB = 10**6
SIZES = {"parameters": 10 * MB, "gradients": 10 * MB, "optimizer": 20 * MB, "buffers": 5 * MB, "activations": 55 * MB}
PLAN = {
    "recipe": {"name": "own", "folder": "/nonesuch"},
    "config": {"training_config": {"optimizer": "adamw"}},
    "ranks": [{"rank": 0, "role": "worker"}],
}


def written(**changed):
    rank = {"facts": {"values": 2_500_000, "tensors": 3, "micro_batches": 8}, "held": SIZES}
    rank["memory"] = {**SIZES, "peak": 100 * MB}
    return json.dumps({"library_bytes": 1, "ranks": [{**rank, **changed}]}).encode()


def verdict(sizes, peak, *, edges=()):
    prediction = read_prediction(written(), PLAN, runs_recipe=False)
    traffic = Settlement(1, 1, tuple(edges))
    return judge(traffic, prediction, [RankMemory(0, 2, sizes, peak)])


def test_the_formula_counts_weights_gradients_and_the_state_of_adamw():
    (rank,) = read_prediction(written(), PLAN, runs_recipe=False).ranks

    assert {"parameters": 10 * MB, "gradients": 10 * MB, "optimizer": 20 * MB + 4 * 3} == rank.formula
    assert 4 * 10 * MB == rank.sums_at_most  # of 8 micro-batches, sums of 4, 2, 1 and 1


def test_a_rank_that_updates_nothing_has_no_state_by_the_formula():
    held = {**SIZES, "optimizer": 0}
    (rank,) = read_prediction(written(held=held), PLAN, runs_recipe=False).ranks

    assert 0 == rank.formula["optimizer"]


@pytest.mark.parametrize("data", [b"", b"{}", b'{"library_bytes": 1, "ranks": []}', written(memory={"peak": "many"})])
def test_what_does_not_fit_the_plan_is_no_prediction(data):
    assert read_prediction(data, PLAN, runs_recipe=False) is None


def test_a_rank_without_steps_has_no_memory_to_compare():
    prediction = read_prediction(written(held={}, memory={}), PLAN, runs_recipe=False)

    assert () == judge(None, prediction, [RankMemory(0, 2, SIZES, 100 * MB)]).memory


def test_a_prediction_that_is_right_is_not_noted():
    edges = [Edge("gradients", 0, 1, 1, 1000, 1000), Edge("hidden", 0, 1, 1, None, 5), Edge("own", 0, 1, 1, 7, None)]
    found = verdict(SIZES, 100 * MB, edges=edges)

    assert ((1000, 1000), 0.0, None, []) == (found.sent, found.memory[0].error, found.memory[0].missed, found.notes())


def test_a_miss_of_more_than_a_tenth_is_noted_with_the_term_that_missed():
    measured = {**SIZES, "activations": 80 * MB, "buffers": 6 * MB}
    found = verdict(measured, 125 * MB, edges=[Edge("gradients", 0, 1, 1, 1000, 1200)])

    assert [
        "the bytes between ranks were predicted 20% too high",
        "the memory of rank 0 was predicted 20% too low, mostly its activations",
    ] == found.notes()


def test_a_miss_of_a_twentieth_is_shown_and_not_noted():
    found = verdict({**SIZES, "buffers": 10 * MB}, 105 * MB)

    assert ("buffers", []) == (found.memory[0].missed, found.notes())
    assert pytest.approx(-5 / 105) == found.memory[0].error
