"""Which members count as hung."""

from ttlaunch.membership.pulse import LEAST_S, Beat, Pulse


def test_a_member_that_changes_nothing_for_long_is_late_although_it_reports():
    found = Pulse()
    found.restart([0, 1], 0.0)
    for second in range(7):
        found.note(0, Beat((second,), waits=False), float(second))
        found.note(1, Beat((3,), waits=False), float(second))
    assert {1: 6.0} == found.late(6.0)


def test_a_member_that_waits_is_late_only_when_it_falls_silent():
    found = Pulse()
    found.restart([0, 1], 0.0)
    found.note(1, Beat((3,), waits=True), 0.0)
    for second in range(11):
        found.note(0, Beat((3,), waits=True), float(second))
    assert {1: 10.0} == found.late(10.0)


def test_long_steps_extend_the_limit_and_announced_work_has_its_own():
    found = Pulse()
    assert LEAST_S == found.hang_s
    for _ in range(9):
        found.note_step(3.0)
    assert 12.0 == found.hang_s
    found.restart([0], 0.0)
    for second in range(61):
        assert not found.late(float(second))
        found.note(0, Beat((), waits=False, limit_s=60.0), float(second))
    assert {0: 61.0} == found.late(61.0)


def test_a_member_that_may_take_long_and_falls_silent_was_stopped():
    found = Pulse()
    found.restart([0], 0.0)
    found.note(0, Beat((), waits=False, limit_s=600.0), 1.0)
    assert not found.late(16.0)
    assert {0: 15.5} == found.late(16.5)
