"""Plans of steps as numbers: what was sent is what is read, and numbers that are no plan are refused by name."""

import pytest
import torch

from ttlaunch.runtime.serving.step_plan import Copy, Span, StepPlan

PLAN = StepPlan(7, (Span(0, 3, 2, 1), Span(2, 0, 5, 0)), (Copy(0, 2, 3),))


def read(numbers, *, slots=4, context=16, dtype=torch.int64):
    return StepPlan.from_tensor(torch.tensor(numbers, dtype=dtype), slots=slots, context=context)


def test_a_plan_is_read_as_it_was_written_even_from_a_longer_buffer():
    numbers = PLAN.to_tensor().tolist()
    assert (PLAN, PLAN) == (read(numbers), read([*numbers, -1, 99]))
    assert (7, 1) == (PLAN.rows, PLAN.wanted)


def test_a_buffer_for_a_plan_of_all_slots_is_long_enough():
    spans = tuple(Span(slot, 0, 1, 1) for slot in range(4))
    copies = tuple(Copy((slot + 1) % 4, slot, 1) for slot in range(4))
    assert StepPlan.most_numbers(4) == len(StepPlan(0, spans, copies).to_tensor())


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1, 0, 0], "at least 4 numbers"),
        ([2, 0, 0, 0], "version 2, expected 1"),
        ([1, -1, 0, 0], "step -1"),
        ([1, 0, 0, 5], "5 spans, but there are 4 slots"),
        ([1, 0, 2**40, 0], "copies"),
        ([1, 0, 0, 1, 0, 0, 1], "7 numbers, expected 8"),
        ([1, 0, 0, 1, 4, 0, 1, 1], "below 4"),
        ([1, 0, 0, 2, 1, 0, 1, 1, 1, 0, 1, 1], "slots ascend"),
        ([1, 0, 0, 1, 0, 16, 1, 1], "does not fit"),
        ([1, 0, 0, 1, 0, 0, 0, 0], "does not fit"),
        ([1, 0, 0, 1, 0, -1, 2, 0], "does not fit"),
        ([1, 0, 0, 1, 0, 0, 1, 2], "more logits"),
        ([1, 0, 1, 0, 1, 1, 3], "impossible"),
        ([1, 0, 1, 0, 0, 1, 17], "impossible"),
    ],
)
def test_numbers_that_are_no_plan_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        read(numbers)


def test_a_plan_of_another_number_format_is_refused():
    with pytest.raises(ValueError, match="float32"):
        read([1, 0, 0, 0], dtype=torch.float32)
