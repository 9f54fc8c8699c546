"""How often a run is polled."""

from ttlaunch.running.pace import Pace


def test_the_first_waits_are_short_so_that_a_quick_rank_s_line_is_shown_at_once():
    """They used to be 0.1 s in the supervisor and again in the view."""
    assert Pace().wait_s <= 0.02
