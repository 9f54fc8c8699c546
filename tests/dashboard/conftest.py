"""A folder of runs, and the application that shows them."""

import pytest

from tests.dashboard.made_run import MadeRun


@pytest.fixture
def make_run(tmp_path):
    """`make_run(run_id, …)`: a run's folder in `runs/`, with nothing but its plan."""
    return lambda run_id="2026-01-01T00-00-00-aaaa", **plan: MadeRun(tmp_path / "runs" / run_id, **plan)
