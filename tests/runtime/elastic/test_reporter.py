"""For how long a worker of an elastic run may make no progress, as it reports that itself."""

import pytest

from ttlaunch.membership.messages import Member, Progressed
from ttlaunch.membership.pulse import LEAST_S
from ttlaunch.runtime.elastic.reporter import Reporter
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter


@pytest.fixture
def limits():
    """A reporter, and the limits that it has reported."""
    written = []
    reporter = Reporter(lambda **fields: written.append(fields["limit_s"]), TrafficCounter())

    def limit():
        reporter.report(Progressed(Member(1, 0), epoch=1, applied=0))
        return written[-1]

    yield reporter, limit
    reporter.close()


def test_a_worker_that_computes_tasks_has_the_limit_of_its_own_micro_batches_and_needs_no_step_of_the_run_for_that(
    limits,
):
    reporter, limit = limits
    reporter.has_own_tasks = True
    reporter.note_micro_batch(30.0)
    assert limit() > 100 * LEAST_S  # the first micro-batch of a process may take long
    reporter.note_micro_batch(0.1)
    assert LEAST_S == limit()
    reporter.note_micro_batch(20.0)
    reporter.note_micro_batch(20.0)
    assert 80.0 == limit()
    with reporter.long():
        assert limit() > 100 * LEAST_S


def test_a_worker_that_makes_steps_has_the_limit_of_the_run_after_its_first(limits):
    reporter, limit = limits
    reporter.note_micro_batch(0.1)
    reporter.note_micro_batch(0.1)
    assert limit() > 100 * LEAST_S
    reporter.has_stepped = True
    assert limit() is None
