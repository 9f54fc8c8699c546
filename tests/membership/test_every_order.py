"""No order of events lets an elastic run count a leaf twice, or keeps it from finishing; and the search finds what would.

`benchmarks/membership_checker.py` explores larger runs.
"""

import pytest

from tests.membership.explorer import explore
from tests.membership.mutants import MUTANTS, setting_of
from tests.membership.process import Work
from tests.membership.world import Budget, Setting, World

LONGEST_TRACE = 19
SETTINGS = {
    "one crashes, one is suspected": Setting(budget=Budget(crashes=1, suspicions=1)),
    "one crashes between buckets of two steps": Setting(work=Work(steps=2, buckets=2), budget=Budget(crashes=1)),
    "one comes, one leaves, an order is lost": Setting(
        workers=1, work=Work(validates=True), budget=Budget(joins=1, leaves=1, lost_orders=1), follows=False
    ),
    "one gets the state while the other goes on, one leaves": Setting(
        workers=1, work=Work(validates=True), budget=Budget(joins=1, leaves=1)
    ),
    "one gets the state while others go on, one crashes": Setting(
        workers=1, work=Work(steps=2), budget=Budget(joins=1, crashes=1)
    ),
    "one of three crashes before all are ready": Setting(
        workers=3, maximum=3, work=Work(micro_batches=3), budget=Budget(crashes=1), is_running=False
    ),
    "the owner of a slot crashes": Setting(
        workers=3, maximum=3, work=Work(micro_batches=3, slots=0), budget=Budget(crashes=1)
    ),
    "one of two owners crashes, in any of two steps": Setting(work=Work(steps=2, slots=0), budget=Budget(crashes=1)),
    "one crashes where both are needed until the run is ordered to stop": Setting(
        minimum=2, budget=Budget(crashes=1, ends=1)
    ),
    "a connection between two that live breaks": Setting(work=Work(steps=2, validates=True), budget=Budget(breaks=1)),
    "a connection breaks, and one crashes": Setting(budget=Budget(crashes=1, breaks=1)),
    "a connection between owners breaks": Setting(work=Work(slots=0), budget=Budget(breaks=1)),
    "an owner leaves": Setting(work=Work(slots=0), budget=Budget(leaves=1)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_order_of_events_counts_each_leaf_once_and_can_finish(name):
    found = explore(World(SETTINGS[name]))
    assert ("", ()) == (found.mistake, found.trace)
    assert found.is_complete
    assert found.ended


@pytest.mark.parametrize("name", MUTANTS)
def test_a_protocol_that_is_broken_in_one_place_is_found_out(name):
    found = explore(World(setting_of(name)))
    assert MUTANTS[name][2] in found.mistake
    assert 0 < len(found.trace) <= LONGEST_TRACE
