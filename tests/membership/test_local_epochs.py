"""Which workers share a local step follows from the epochs, each with its members and the step after which it began."""

from ttlaunch.membership.coordinator import step
from ttlaunch.membership.coordinator_state import Coordinator, Terms
from ttlaunch.membership.local_epochs import makers_of, still_counting
from ttlaunch.membership.messages import Answered, Begin, Lost, Member, Progressed, Registered, Seat

ONE, TWO, THREE = (0, (0, 1, 2)), (4, (0, 2)), (7, (0, 2, 3))


def test_a_step_that_members_may_have_made_when_an_epoch_begins_keeps_its_makers():
    found = {number: makers_of([ONE, TWO, THREE], number) for number in (1, 5, 6, 8, 9)}
    assert {1: (0, 1, 2), 5: (0, 1, 2), 6: (0, 2), 8: (0, 2), 9: (0, 2, 3)} == found


def test_the_first_epoch_counts_from_its_first_step_on_wherever_the_run_has_begun():
    assert (1, 2) == makers_of([(30, (1, 2))], 31)


def test_an_epoch_of_which_nobody_who_lives_has_made_a_step_is_void():
    assert (ONE, TWO) == still_counting([ONE, TWO, THREE], begun=7, made=[7, 2, None])
    assert (ONE,) == still_counting([ONE, TWO, THREE], begun=3, made=[3])


def test_an_epoch_whose_steps_all_members_have_made_is_forgotten():
    assert (ONE, TWO) == still_counting([ONE, TWO], begun=7, made=[7, 4])
    assert (TWO,) == still_counting([ONE, TWO], begun=7, made=[7, 5])


def after(state, *events):
    for event in events:
        state, orders = step(state, event)
    return state, orders


def test_members_that_are_behind_learn_of_the_epochs_that_they_have_missed():
    first = [Member(number, 0) for number in range(3)]
    terms = Terms(1, 4, 8, frozenset(range(3)), has_local_steps=True)
    state, _ = after(Coordinator(terms), *(Registered(Seat(member), 0) for member in first))
    state, _ = after(state, *(Answered(member, 1, 0) for member in first))
    state, _ = after(state, Progressed(first[0], 1, 5, pace_s=1.0), Lost(first[1]))
    state, _ = after(state, Answered(first[0], 2, 5), Answered(first[2], 2, 3))
    state, _ = after(state, Registered(Seat(Member(3, 0)), None))
    answers = [Answered(first[0], 3, 6), Answered(first[2], 3, 3), Answered(Member(3, 0), 3, None)]
    _, orders = after(state, *answers)
    [order] = [order for order in orders if isinstance(order.message, Begin)]
    assert (first[0], first[2], Member(3, 0)) == order.to
    begin = order.message
    assert ((0, (0, 1, 2)), (5, (0, 2))) == begin.earlier
    assert (6, ((2, 3), (3, None))) == (begin.applied, begin.behind)
    assert ((0, 3), (3, 6), (6, 8)) == begin.blocks  # equal, however fast they are
    assert ((), (), ()) == begin.todo  # nobody makes again what was lost
