"""Which epochs of a journal count for the bits of a run with local steps, and which journals cannot be followed."""

import pytest

from ttlaunch.spec.recipe.recorded_epochs import RecordedEpoch, UnusableEpochsError, epochs_of


def epoch(step, members, joined=()):
    return {"what": "epoch", "step": step, "members": list(members), "joined": list(joined)}


def test_other_entries_say_nothing_about_who_took_part():
    journal = [{"what": "registered", "worker": 5}, epoch(0, (0, 1)), {"what": "lost", "worker": 1}, epoch(3, (0,))]
    assert (RecordedEpoch(0, (0, 1)), RecordedEpoch(3, (0,))) == epochs_of(journal, done=0, total=9)


def test_an_epoch_without_a_step_does_not_count_and_who_came_with_it_came_with_the_next():
    journal = [epoch(0, (0, 1)), epoch(4, (0, 1, 2, 3), joined=(2, 3)), epoch(4, (0, 2)), epoch(6, (0, 2))]
    assert (
        RecordedEpoch(0, (0, 1)),
        RecordedEpoch(4, (0, 2), came=(2,)),
        RecordedEpoch(6, (0, 2)),
    ) == epochs_of(journal, done=0, total=9)


def test_the_first_epoch_divides_the_first_step_also_when_it_made_none():
    journal = [epoch(2, (0, 1, 2)), epoch(2, (0, 1))]
    assert (RecordedEpoch(2, (0, 1, 2)), RecordedEpoch(2, (0, 1))) == epochs_of(journal, done=2, total=9)


def test_a_newer_process_with_the_number_of_a_former_one_has_come():
    journal = [epoch(0, (0, 1)), epoch(2, (0,)), epoch(4, (0, 1), joined=(1,)), epoch(4, (0, 1))]
    assert RecordedEpoch(4, (0, 1), came=(1,)) == epochs_of(journal, done=0, total=9)[-1]


@pytest.mark.parametrize(
    ("journal", "reason"),
    [
        ([], "its journal does not say who took part"),
        ([epoch(1, (0,))], "its journal goes from step 1 to 1, the run from 0 to 9"),
        ([epoch(0, (0,)), epoch(10, (0,))], "its journal goes from step 0 to 10, the run from 0 to 9"),
        ([epoch(0, (0,)), epoch(5, (0,)), epoch(4, (0,))], "an epoch after step 4 behind one after a later step"),
        ([epoch(0, (0,)), epoch(5, (0, 7))], "its journal does not say how worker 7 came to the epoch after step 5"),
        ([epoch(0, ())], "an epoch in its journal is damaged"),
        ([epoch(0, (1, 1))], "an epoch in its journal is damaged"),
        ([epoch(0, (0,), joined=(1,))], "an epoch in its journal is damaged"),
        ([epoch(0, (-1,))], "an epoch in its journal is damaged"),
        ([epoch("0", (0,))], "an epoch in its journal is damaged"),
        ([epoch(0, ([],))], "an epoch in its journal is damaged"),
        ([{"what": "epoch", "step": 0, "members": {"0": 1}, "joined": []}], "an epoch in its journal is damaged"),
    ],
)
def test_a_journal_that_cannot_be_followed_is_refused_with_the_reason(journal, reason):
    with pytest.raises(UnusableEpochsError) as caught:
        epochs_of(journal, done=0, total=9)
    assert reason in str(caught.value)
