"""What is said about messages that cannot be right, sentence by sentence."""

import pytest

from ttlaunch.runtime.comm.findings import Finding, Place, Side, find_deadlock, find_unmatched

ROLES = ["worker", "server", "watcher"]


def side(rank, verb, peer, *, tag=0, line=1):
    what = "float32 of shape (3,)"
    return Side(rank, ROLES[rank], verb == "sends", peer, ROLES[peer], tag, what, Place("/r/trainer.py", line))


HINT = "let one of them receive first, or start with `isend` or `irecv` and wait later"


def test_a_side_says_who_does_what_with_whom():
    sends, receives = side(0, "sends", 1, tag=4), side(1, "receives", 0)
    assert "rank 0 (worker) sends float32 of shape (3,) to rank 1 (server), tag 4" == str(sends)
    assert "rank 1 (server) receives float32 of shape (3,) from rank 0 (worker), tag 0" == str(receives)
    assert (0, 1) == sends.edge == receives.edge


def test_a_circle_is_told_from_its_lowest_rank_and_others_wait_beside_it():
    waiting = {rank: side(rank, "receives", peer) for rank, peer in ((0, 1), (1, 2), (2, 1))}
    found = find_deadlock(waiting, [], frozenset())
    assert ("R021", "ranks wait for each other: 1 → 2 → 1", HINT) == (found.code, found.message, found.hint)
    assert ((waiting[1], waiting[2]), (str(waiting[0]),)) == (found.sides, found.notes)


def test_ranks_that_all_send_may_be_hidden_by_buffers():
    waiting = {0: side(0, "sends", 1), 1: side(1, "sends", 0)}
    note = "all of them send; with small tensors MPI's buffers may hide that, with large ones it hangs"
    assert (note,) == find_deadlock(waiting, list(waiting.values()), frozenset()).notes
    mixed = {0: side(0, "sends", 1), 1: side(1, "receives", 0, tag=1)}
    notes = find_deadlock(mixed, [mixed[0]], frozenset()).notes
    assert (f"{mixed[0]} (/r/trainer.py:1)",) == notes


@pytest.mark.parametrize(
    ("waiting", "finished", "message"),
    [
        ({0: side(0, "receives", 2)}, {1, 2}, "rank 0 (worker) waits for rank 2 (watcher), which has ended"),
        ({0: side(0, "receives", 0)}, {1, 2}, "rank 0 (worker) waits for itself"),
        (
            {0: side(0, "receives", 1), 1: side(1, "receives", 2)},
            {2},
            "rank 1 (server) waits for rank 2 (watcher), which has ended",
        ),
    ],
)
def test_a_wait_that_nobody_can_end_is_told(waiting, finished, message):
    found = find_deadlock(waiting, [], frozenset(finished))
    last = waiting[max(waiting)]
    assert (message, (last,)) == (found.message, found.sides)
    assert tuple(str(one) for one in waiting.values() if one is not last) == found.notes


def test_only_messages_between_the_same_two_ranks_with_another_tag_are_named():
    waits, answers = side(1, "receives", 0, tag=2), side(0, "receives", 1)
    unmatched = [
        side(0, "sends", 1, tag=2, line=10),  # with the tag that is waited for
        side(2, "sends", 1, tag=5, line=11),  # from another rank
        side(1, "sends", 0, tag=7, line=12),  # the other way: for the other one that waits
        side(0, "sends", 1, tag=6, line=13),
        side(0, "sends", 1, tag=8, line=14),  # one of them is enough
    ]
    notes = find_deadlock({0: answers, 1: waits}, unmatched, frozenset({2})).notes
    assert (f"{unmatched[2]} (/r/trainer.py:12)", f"{unmatched[3]} (/r/trainer.py:13)") == notes


def test_what_is_left_over_is_told_once_a_line():
    sent, again, expected = side(0, "sends", 1, line=3), side(2, "sends", 1, line=3), side(1, "receives", 0, line=4)
    hint = "every `send` needs one `recv`, and every `recv` one `send`, with the same tag"
    assert [
        Finding("R022", f"{sent}, which no rank receives (2 times)", (sent,), hint),
        Finding("R022", f"{expected}, which no rank sends", (expected,), hint),
    ] == find_unmatched([sent, again, expected])


def test_a_finding_is_the_same_as_json():
    found = Finding("R022", "a message", (side(0, "sends", 1, tag=4, line=3),), "a hint", ("a note",))
    place = {"file": "/r/trainer.py", "line": 3}
    text = "rank 0 (worker) sends float32 of shape (3,) to rank 1 (server), tag 4"
    ends = {"rank": 0, "role": "worker", "is_send": True, "peer": 1, "peer_role": "server", "tag": 4}
    one = {**ends, "what": "float32 of shape (3,)", "place": place, "text": text}
    expected = {"code": "R022", "message": "a message", "sides": [one], "hint": "a hint", "notes": ["a note"]}
    assert expected == found.as_json()
