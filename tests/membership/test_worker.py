"""What a worker of an elastic run notes about itself."""

import pytest

from ttlaunch.membership import worker
from ttlaunch.membership.messages import Begin, Member, Prepare, Seat
from ttlaunch.membership.worker import WorkerState


@pytest.mark.parametrize(("validates", "validated"), [(True, None), (False, 7)])
def test_who_gets_the_weights_of_a_step_has_also_done_what_followed_it_if_that_is_over(validates, validated):
    seats = (Seat(Member(0, 0)), Seat(Member(1, 0)))
    order = Begin(1, seats, 7, ((), ()), (((0, 1),), ((1, 2),)), ((0, 1), (1, 2)), ((1, None),), (0,), validates)
    state = worker.catch_up(worker.begin(worker.prepare(WorkerState(Member(1, 0)), Prepare(1)), order))
    assert (7, validated) == (state.applied, state.validated)
