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


def test_ten_calm_minutes_of_a_member_at_a_quarter_of_the_speed_raise_no_alarm():
    """Four members, four micro-batches each of 0.5 s, one of them of 2 s: a step takes 8 s, and three members wait for most of it."""
    found, done = Pulse(), [0] * 4
    found.restart(range(4), 0.0)
    for half_seconds in range(1, 2 * 600):
        now = half_seconds / 2
        step, into_step = divmod(now, 8.0)
        for number in range(4):
            made = min(4, int(into_step / (2.0 if number == 3 else 0.5)))
            done[number] = int(4 * step + made)
            found.note(number, Beat((done[number], int(step)), waits=made == 4), now)
        if into_step == 0:
            found.note_step(8.0)
        assert not found.late(now), now
    assert 32.0 == found.hang_s


def test_nothing_is_expected_of_a_member_that_is_gone():
    found = Pulse()
    found.restart(range(2), 0.0)
    found.note(1, Beat((), waits=True), 4.0)
    found.forget(0)
    assert not found.late(8.0)
    found.forget(0)


def test_nobody_is_late_because_of_a_time_in_which_nobody_looked():
    """The machine stood still from second 3 to 90; worker 2 reports before the others can."""
    found = Pulse()
    found.restart(range(3), 0.0)
    found.note(1, Beat((), waits=True), 2.0)
    found.note(2, Beat((1,), waits=False), 90.0)
    found.excuse(87.0, 90.0)
    assert not found.late(92.0)
    assert {0: 5.5} == found.late(92.5)
    assert {0: 8.1, 1: 6.1, 2: 5.1} == {number: round(late_s, 1) for number, late_s in found.late(95.1).items()}
