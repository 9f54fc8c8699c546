"""The orders of a pipeline's passes, by their properties, for many sizes."""

import doctest
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch.runtime.comm import reduction
from ttlaunch.runtime.parallel.pipeline import schedules
from ttlaunch.runtime.parallel.pipeline.schedules import Action, order_of_passes

from .pipelines import most_in_flight

SIZES = st.one_of(
    st.tuples(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 20), st.just(1)),
    st.tuples(st.just("interleaved"), st.integers(1, 8), st.integers(1, 20), st.integers(1, 4)),
)


def orders_of(size):
    name, stages, micro_batches, chunks = size
    return [
        order_of_passes(name, stage, num_stages=stages, num_micro_batches=micro_batches, num_chunks=chunks)
        for stage in range(stages)
    ]


def needed(action, stage, *, stages, chunks):
    """The pass that an action waits for, and the stage that makes it; None if it needs only data."""
    step = 1 if action.kind == "F" else -1
    part = action.chunk * stages + stage - step
    if 0 <= part < stages * chunks:
        return part % stages, Action(action.kind, action.micro_batch, part // stages)
    return None if action.kind == "F" else (stage, Action("F", action.micro_batch, action.chunk))


@pytest.mark.parametrize("module", [schedules, reduction])
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


@given(SIZES)
def test_every_micro_batch_goes_forward_and_back_once_through_every_chunk_and_in_order(size):
    _, _, micro_batches, chunks = size
    for order in orders_of(size):
        assert 2 * micro_batches * chunks == len(order)
        for kind in "FB":
            for chunk in range(chunks):
                found = [action.micro_batch for action in order if (action.kind, action.chunk) == (kind, chunk)]
                assert list(range(micro_batches)) == found


@given(SIZES)
def test_a_forward_pass_comes_before_its_backward_pass(size):
    for order in orders_of(size):
        at = {action: place for place, action in enumerate(order)}
        assert all(
            at[action] < at[Action("B", action.micro_batch, action.chunk)] for action in at if action.kind == "F"
        )


@given(SIZES)
def test_as_many_micro_batches_are_in_flight_as_the_theory_says(size):
    """GPipe m, 1F1B p - stage, interleaved 2 (p - stage - 1) + (v - 1) p + 1 where p divides m."""
    name, stages, micro_batches, chunks = size
    for stage, order in enumerate(orders_of(size)):
        theory = {
            "gpipe": micro_batches,
            "1f1b": min(stages - stage, micro_batches),
            "interleaved": min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micro_batches * chunks),
        }
        if name != "interleaved" or micro_batches % stages == 0:
            assert theory[name] == most_in_flight(order)


@given(SIZES)
def test_neighbours_receive_in_the_order_in_which_the_other_sends(size):
    """Else messages with equal tags, or sends that wait for their receives, would mix or block."""
    _, stages, _, chunks = size
    sent, expected = {}, {}
    for stage, order in enumerate(orders_of(size)):
        for action in order:
            source = needed(action, stage, stages=stages, chunks=chunks)
            if source is not None and source[0] != stage:
                expected.setdefault((source[0], stage, action.kind), []).append(source[1])
    for stage, order in enumerate(orders_of(size)):
        for (source, dest, kind), actions in expected.items():
            if source == stage:
                sent[source, dest, kind] = [action for action in order if action in set(actions)]
    assert expected == sent


@given(SIZES)
def test_nobody_waits_for_ever(size):
    """Run all stages: a pass may start when the pass it depends on has ended; everything must get done."""
    _, stages, micro_batches, chunks = size
    orders = orders_of(size)
    done, at, moved = set(), [0] * stages, True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                action = order[at[stage]]
                source = needed(action, stage, stages=stages, chunks=chunks)
                if source is not None and source not in done:
                    break
                done.add((stage, action))
                at[stage] += 1
                moved = True
    assert [2 * micro_batches * chunks] * stages == at


@pytest.mark.parametrize(("chunks", "expected"), [(1, 3), (2, 1.5), (3, 1)])
def test_chunks_shorten_the_bubble(chunks, expected):
    """With p = 4, m = 8, equal passes of 1 / v: idle are (p - 1) / v forward passes and as many backward ones."""
    size = ("interleaved", 4, 8, chunks)
    ended, clock, at = {}, Counter(), Counter()
    orders = orders_of(size)
    while any(at[stage] < len(order) for stage, order in enumerate(orders)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                source = needed(order[at[stage]], stage, stages=4, chunks=chunks)
                if source is not None and source not in ended:
                    break
                clock[stage] = max(clock[stage], ended.get(source, 0)) + 1 / chunks
                ended[stage, order[at[stage]]] = clock[stage]
                at[stage] += 1
    assert pytest.approx(2 * expected) == max(clock.values()) - 2 * 8


@pytest.mark.parametrize(
    ("name", "stage", "stages", "micro_batches", "chunks"),
    [("1f1b", 2, 2, 1, 1), ("1f1b", -1, 2, 1, 1), ("gpipe", 0, 1, 0, 1), ("interleaved", 0, 1, 1, 0)],
)
def test_a_schedule_that_cannot_be_is_refused(name, stage, stages, micro_batches, chunks):
    with pytest.raises(ValueError, match="no schedule"):
        order_of_passes(name, stage, num_stages=stages, num_micro_batches=micro_batches, num_chunks=chunks)


def test_only_the_interleaved_schedule_has_several_chunks():
    with pytest.raises(ValueError, match="schedule gpipe has one chunk a rank, not 2"):
        order_of_passes("gpipe", 0, num_stages=2, num_micro_batches=2, num_chunks=2)
