"""The rules of an elastic run hold among workers that come, leave, are killed and fall silent all the time; broken code is found out."""

from dataclasses import replace

import pytest

from tests.membership import mutants
from tests.membership.explorer import Violation
from tests.membership.fleet import Climate, Fleet
from ttlaunch.membership import coordinator
from ttlaunch.membership.coordinator_state import Phase
from ttlaunch.membership.messages import Lost, Registered

SMALL = Climate(workers=40, micro_batches=128, minutes=5, churn=0.2, wakes_after_s=(0.0, 1.0, 45.0), checks_all=True)


@pytest.mark.parametrize("seed", range(3))
def test_no_worker_step_or_leaf_is_lost_in_a_fleet_that_changes_all_the_time(seed):
    found = Fleet(replace(SMALL, seed=seed)).run()
    assert {"join", "leave", "kill", "silent"} == found.changes.keys()
    assert found.fenced
    assert found.steps >= 5
    assert found.workers >= 30


def _drop(state, *events, kind):
    is_late = state.phase is Phase.COLLECTING and isinstance(events[0], kind)
    return (state, []) if is_late else coordinator.step(state, *events)


def forget_the_lost(state, *events):
    return _drop(state, *events, kind=Lost)


def forget_who_comes(state, *events):
    return _drop(state, *events, kind=Registered)


def go_back(state, *events):
    after, orders = coordinator.step(state, *events)
    return (replace(after, epoch=state.epoch - 1) if after.epoch > 2 else after), orders


def give_a_leaf_twice(order, _):
    return replace(order, todo=(*order.todo[:-1], (*order.todo[-1], (0, 1))))


def drop_a_leaf_of_later_steps(order, _):
    first, stop = order.blocks[0]
    return replace(order, blocks=((first + 1, stop), *order.blocks[1:]))


def turn_ranks_round(order, _):
    return replace(order, seats=order.seats[::-1])


MUTANTS = {
    forget_the_lost: "does not begin|is known although it is lost",
    forget_who_comes: "are not known",
    go_back: "the epoch goes",
    mutants.tell_nobody: "is not told|live and are not known",
    mutants.bring_back: "two incarnations",
}
OF_BEGINS = {
    mutants.start_from_the_smallest: "starts from step",
    mutants.keep_every_node: "not each leaf",
    give_a_leaf_twice: "not each leaf",
    drop_a_leaf_of_later_steps: "not each leaf",
    turn_ranks_round: "ranks are not",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_coordinator_that_is_broken_is_found_out(mutant):
    with pytest.raises(Violation, match=MUTANTS[mutant]):
        Fleet(SMALL, step=mutant).run()


@pytest.mark.parametrize("mutant", OF_BEGINS, ids=lambda mutant: mutant.__name__)
def test_an_epoch_that_begins_wrongly_is_found_out(mutant):
    step = mutants.change_begin(mutant)
    # Few fleets have a leaf at a worker that comes again, and at the one that computes it in its place.
    fleets = (Fleet(replace(SMALL, seed=seed), step=step).run() for seed in range(10))
    with pytest.raises(Violation, match=OF_BEGINS[mutant]):
        list(fleets)
