"""A prediction read back, and how far a run was from it (E9)."""

import json

import pytest

from ttlaunch.records.calibration import KeptPlan
from ttlaunch.running.metrics.prediction import (
    RUNNING_BYTES,
    Verdict,
    held_at_most,
    judge,
    judge_time,
    process_bytes,
    read_prediction,
)
from ttlaunch.running.metrics.telemetry import RankMemory, RankTelemetry
from ttlaunch.running.metrics.time_prediction import Interval, RankTime, TimePrediction
from ttlaunch.running.metrics.traffic import Edge, Settlement

MB = 10**6
SIZES = {"parameters": 10 * MB, "gradients": 10 * MB, "optimizer": 20 * MB, "buffers": 5 * MB, "activations": 55 * MB}
PLAN = {
    "recipe": {"name": "own", "folder": "/nonesuch"},
    "config": {"training_config": {"optimizer": "adamw"}},
    "ranks": [{"rank": 0, "role": "worker", "host": "localhost"}],
}


def written(*, beside=None, **changed):
    rank = {"facts": {"values": 2_500_000, "tensors": 3, "micro_batches": 8}, "held": SIZES}
    rank["memory"] = {**SIZES, "peak": 100 * MB}
    return json.dumps({"library_bytes": 1, **(beside or {}), "ranks": [{**rank, **changed}]}).encode()


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


def test_a_process_is_compared_with_libraries_tensors_and_freed_activations_together():
    prediction = read_prediction(written(), PLAN, runs_recipe=False)
    found = judge(None, prediction, [], processes={0: 300 * MB, 7: 1})

    (process,) = found.memory
    assert ("process", 1 + RUNNING_BYTES + 155 * MB, "tensors") == (process.of, process.predicted, process.missed)
    assert ["the process of rank 0 was predicted 44% too low, mostly its tensors"] == found.notes()


def test_what_a_step_loads_counts_whole_where_passes_are_made_and_in_part_elsewhere():
    facts = {"values": 2_500_000, "tensors": 3, "micro_batches": 8}
    parts = {"computing_bytes": 30 * MB, "computing_shared_bytes": 20 * MB, "data_bytes": 7 * MB}
    computes = read_prediction(written(beside=parts, workspace_bytes=2 * MB), PLAN, runs_recipe=False)
    adds_up = read_prediction(written(beside=parts, facts={**facts, "passes": 0}), PLAN, runs_recipe=False)

    plain = 1 + RUNNING_BYTES + 155 * MB
    assert plain + (30 + 7 + 2) * MB == process_bytes(computes, computes.ranks[0])
    assert plain + (10 + 7) * MB == process_bytes(adds_up, adds_up.ranks[0])


def test_a_run_without_checkpoints_keeps_no_copy():
    saves = written(facts={"values": 2_500_000, "tensors": 3, "micro_batches": 8, "saves": 1})
    plan = {**PLAN, "config": {**PLAN["config"], "checkpoint_config": {"interval": None}}}

    assert 0 == read_prediction(saves, plan, runs_recipe=False).ranks[0].saved


def test_a_rank_that_saves_checkpoints_keeps_a_copy_of_weights_and_state():
    saves = {"facts": {"values": 2_500_000, "tensors": 3, "micro_batches": 8, "saves": 1}}
    plain, saving = (read_prediction(data, PLAN, runs_recipe=False) for data in (written(), written(**saves)))

    assert (0, 30 * MB) == (plain.ranks[0].saved, saving.ranks[0].saved)
    assert 30 * MB == process_bytes(saving, saving.ranks[0]) - process_bytes(plain, plain.ranks[0])


def test_a_rank_of_zero_saves_no_weight_that_another_rank_updates():
    facts = {"values": 2_500_000, "tensors": 3, "micro_batches": 8, "saves": 1, "owned_values": 1_250_000}
    (rank,) = read_prediction(written(facts=facts), PLAN, runs_recipe=False).ranks

    assert (10 * MB, 20 * MB) == (rank.held["parameters"], rank.held["optimizer"])
    assert (5 + 20) * MB == rank.saved


def test_a_process_keeps_little_of_what_many_activations_took():
    many = {**SIZES, "activations": 900 * MB, "peak": 1000 * MB}
    prediction = read_prediction(written(memory=many), PLAN, runs_recipe=False)

    assert 1000 * MB + 64 * 2**20 == held_at_most(prediction.ranks[0])


def telemetry(step_us, **phases):
    steps = range(1, 12)
    every = {name: dict.fromkeys(steps, time) for name, time in phases.items()}
    return RankTelemetry(0, is_written=True, last=11, steps=dict.fromkeys(steps, step_us), phases=every)


def said(median, *, high=0.02, busy=1.0, is_wide=False):
    interval = Interval(0.008, median, high)
    phases = {name: Interval(time, time, time) for name, time in (("forward", 0.004), ("backward", 0.006))}
    zero = Interval(0.0, 0.0, 0.0)
    kept = KeptPlan(made=0.0, copies=1, steps=9, busy=busy, halves=0.0, ranks=(), link=None)
    ranks = (RankTime(0, "worker", interval, phases, zero, zero),)
    return TimePrediction(interval, ranks, is_wide=is_wide, is_pipeline=False, kept=kept)


def test_the_phase_that_missed_is_named():
    found = judge_time(said(0.010), [telemetry(12_500, forward=4_000, backward=8_500)])

    assert (0.0125, pytest.approx(-0.2), "backward") == (found.measured, found.error, found.missed)
    assert ["the time of a step was predicted 20% too low, mostly its backward"] == Verdict(
        None, (), time=found
    ).notes()


def test_a_machine_that_was_busy_during_the_calibration_is_told_of():
    found = judge_time(said(0.010, busy=2.0), [telemetry(15_000, forward=4_000, backward=11_000)])

    (note,) = Verdict(None, (), time=found).notes()
    assert note.endswith("within the interval of the calibration, during which the machine was busy")


def test_of_an_interval_alone_only_what_lies_outside_is_an_error():
    within = judge_time(said(0.010, is_wide=True), [telemetry(19_000, forward=9_000, backward=10_000)])
    outside = judge_time(said(0.010, is_wide=True), [telemetry(40_000, forward=20_000, backward=20_000)])

    assert 0.0 == within.error
    assert pytest.approx(-0.5) == outside.error


def test_a_run_of_few_steps_has_no_time_to_compare():
    few = RankTelemetry(0, is_written=True, last=2, steps={1: 10, 2: 10})

    assert judge_time(said(0.010), [few]) is None
