"""1F1B, by its properties."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch.runtime import reduction, schedules
from ttlaunch.runtime.schedules import one_f_one_b

STAGES, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 20)


@pytest.mark.parametrize("module", [schedules, reduction])
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


@given(STAGES, MICRO_BATCHES)
def test_every_micro_batch_goes_forward_and_back_once_and_in_order(stages, micro_batches):
    for stage in range(stages):
        actions = one_f_one_b(stage, num_stages=stages, num_micro_batches=micro_batches)
        for kind in "FB":
            assert list(range(micro_batches)) == [action.micro_batch for action in actions if action.kind == kind]


@given(STAGES, MICRO_BATCHES)
def test_at_most_the_stages_to_the_end_are_in_flight(stages, micro_batches):
    for stage in range(stages):
        in_flight = peak = 0
        for action in one_f_one_b(stage, num_stages=stages, num_micro_batches=micro_batches):
            in_flight += 1 if action.kind == "F" else -1
            peak = max(peak, in_flight)
            assert in_flight >= 0
        assert peak == min(stages - stage, micro_batches)


@given(STAGES, MICRO_BATCHES)
def test_no_pair_of_neighbours_waits_for_each_other(stages, micro_batches):
    """Run all stages: a pass may start when the pass it depends on has ended; everything must get done."""
    orders = [one_f_one_b(stage, num_stages=stages, num_micro_batches=micro_batches) for stage in range(stages)]
    done, at, moved = set(), [0] * stages, True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                action = order[at[stage]]
                source = stage - 1 if action.kind == "F" else stage + 1
                if 0 <= source < stages and (source, str(action)) not in done:
                    break
                done.add((stage, str(action)))
                at[stage] += 1
                moved = True
    assert [2 * micro_batches] * stages == at


@pytest.mark.parametrize(("stage", "stages", "micro_batches"), [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_a_schedule_that_cannot_be_is_refused(stage, stages, micro_batches):
    with pytest.raises(ValueError, match="no schedule"):
        one_f_one_b(stage, num_stages=stages, num_micro_batches=micro_batches)
