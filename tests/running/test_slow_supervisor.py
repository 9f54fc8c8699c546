"""A supervisor whose looks take long."""

from types import SimpleNamespace

from ttlaunch.running import supervise


def test_a_supervisor_that_is_always_slow_still_counts_most_of_the_time(monkeypatch):
    """Otherwise a worker that hangs would never be late where each look takes longer than a second."""
    excused = []
    supervision = SimpleNamespace(_elastic=SimpleNamespace(excuse=excused.append))
    monkeypatch.setattr(supervise, "_now", lambda: 11.25)

    assert 11.25 == supervise._Supervision._notice_standstill(supervision, 10.0)
    assert [0.25] == excused
    supervise._Supervision._notice_standstill(supervision, 10.5)
    assert [0.25] == excused
