"""`ttlaunch advise` says how far it is, also where no terminal shows a picture that changes."""

from types import SimpleNamespace

import pytest

from ttlaunch.cli import advise


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the command believes have passed."""
    now = [100.0]
    monkeypatch.setattr(advise, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize(
    ("is_terminal", "lines"), [(False, ["forms simulated: 1 of 9", "forms simulated: 6 of 9"]), (True, [])]
)
def test_a_long_comparison_says_how_far_it_is_in_few_lines(clock, monkeypatch, is_terminal, lines):
    said = []
    monkeypatch.setattr(advise, "can_redraw", lambda _stream: is_terminal)
    monkeypatch.setattr(advise, "print_progress", lambda _text: None)
    progress = advise._Progress(SimpleNamespace(waiting=said.append))
    for count in range(9):
        progress("forms simulated", count, 9)
        clock[0] += 1.0
    assert lines == said
