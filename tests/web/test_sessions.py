"""What a server remembers of visitors, for a while."""

from ttlaunch.web.sessions import LONGEST_IDLE_S, Sessions, draw_id, is_id


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_session_used_least_recently_gives_way():
    sessions = Sessions(list, clock=Clock(), most=2)
    sessions.open("a").append(1)
    sessions.open("b")
    assert [1] == sessions.get("a")
    sessions.open("c")
    assert (None, [1]) == (sessions.get("b"), sessions.get("a"))


def test_an_idle_session_ends_and_one_in_use_does_not():
    clock = Clock()
    sessions = Sessions(list, clock=clock)
    sessions.open("a").append(1)
    sessions.open("b")
    clock.now = LONGEST_IDLE_S - 1
    sessions.get("a")
    clock.now += 2
    assert ([1], None, 1) == (sessions.get("a"), sessions.get("b"), len(sessions))


def test_ending_says_whether_it_was_there():
    sessions = Sessions(list, clock=Clock())
    sessions.open("a")
    assert (True, False) == (sessions.end("a"), sessions.end("a"))


def test_drawn_ids_have_128_bits_and_others_are_short_and_plain():
    assert is_id(draw_id())
    assert 32 == len(draw_id())
    assert not any(map(is_id, ("", "a b", "a\n", "é", "a" * 129)))
