"""What a calibration has measured is told also where it cannot be kept."""

import errno
import os

import pytest

from ttlaunch.app.calibrate import _keep
from ttlaunch.cli.time_view import render_time
from ttlaunch.records.calibration import KeptPlan
from ttlaunch.running.metrics.time_prediction import Interval, TimePrediction

KEPT = KeptPlan(made=0.0, copies=1, steps=9, busy=1.0, halves=0.0, ranks=(), link=None)


def fail(*_arguments):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_cache_that_cannot_be_written_costs_only_the_next_calibration(monkeypatch):
    monkeypatch.setattr("ttlaunch.app.calibrate.keep", fail)

    assert "read-only file system" == _keep({}, KEPT)


@pytest.mark.parametrize("not_kept", ["read-only file system", None])
def test_a_time_that_could_not_be_kept_is_shown_with_the_reason(not_kept):
    step = Interval(0.008, 0.01, 0.02)
    said = "\n".join(render_time(TimePrediction(step, (), False, False, KEPT, not_kept=not_kept)))  # noqa: FBT003

    assert "a step takes 10.00 ms" in said
    assert (not_kept is not None) == ("cannot be kept in your cache folder: read-only file system" in said)
