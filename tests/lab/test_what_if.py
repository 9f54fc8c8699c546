"""`simulate --virtual --what-if`: which runs are simulated, and how their times are shown. The simulation itself has its own tests."""

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.cli.virtual_view import draw_variants, render_variants
from ttlaunch.diagnostics import LaunchError
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual import Conditions, StepTime, VirtualRun
from ttlaunch.lab.what_if import what_if

BATCH = ("training_config.batch_size=8", "training_config.micro_batch_size=1", "multihost_config.num_workers=4")


def simulated(plan, conditions):
    """A made-up result: 8 ms of work that all ranks share, and 1 ms for messages at 10 Gbit/s."""
    workers, batch = plan.world_size, plan.as_json()["config"]["training_config"]["batch_size"]
    exposed_ms = 10 / conditions.link_gbps * max(conditions.slow_link.values(), default=1.0)
    computing_ms = batch / workers
    step_ms = computing_ms + exposed_ms
    one = StepTime(((0, workers - 1),), "worker", 3, step_ms, computing_ms, exposed_ms, 0.0, (step_ms,) * 3)
    return VirtualRun(plan, conditions, (one,), step_ms, (), 0, 0, 0, None, None)


@pytest.fixture
def variants():
    spec = RunSpec("data_parallel", ranks=4, overrides=BATCH)
    return what_if(spec, Conditions(slow={3: 2.0}), Unattended(), run=simulated)


def test_a_virtual_run_has_as_many_ranks_as_wanted_where_no_cluster_is_named():
    asked = RunSpec("data_parallel", ranks=100, overrides=("training_config.batch_size=200",))
    assert 100 == plan_simulation(asked, Unattended(), has_room=True).world_size
    with pytest.raises(LaunchError, match="`--ranks 100` was given but the hosts offer"):
        plan_simulation(asked, Unattended())


def test_one_thing_differs_at_a_time(variants):
    assert [
        ("as described", 4, 10.0, {}, {3: 2.0}, 8 / 3e-3),
        ("rank 3's link at half speed", 4, 10.0, {3: 2.0}, {3: 2.0}, 8 / 4e-3),
        ("all links at half speed", 4, 5.0, {}, {3: 2.0}, 8 / 4e-3),
        ("one worker less", 3, 10.0, {}, {}, 8 / (1e-3 + 8e-3 / 3)),
        ("twice the workers", 8, 10.0, {}, {3: 2.0}, 8 / 2e-3),
        ("twice the workers, twice the batch", 8, 10.0, {}, {3: 2.0}, 16 / 3e-3),
    ] == [
        (
            one.name,
            found.plan.world_size,
            under.link_gbps,
            under.slow_link,
            under.slow,
            pytest.approx(one.sequences_per_s),
        )
        for one in variants
        for found, under in [(one.found, one.found.conditions)]
    ]


def test_the_table_shows_what_each_change_gains(variants):
    lines = render_variants(variants)
    assert ["as", "described", "4", "3.000", "2.000", "1.000", "0.000", "2,666.7"] == lines[2].split()
    assert lines[6].endswith("4,000.0  +50.0%")
    assert "twice the workers, twice the batch" in draw_variants(variants)


def test_a_change_that_is_not_possible_says_why():
    """Eight workers would need eight micro-batches."""
    few = ("training_config.batch_size=4", *BATCH[1:])
    found = what_if(RunSpec("data_parallel", ranks=4, overrides=few), Conditions(), Unattended(), run=simulated)
    reasons = {one.name: one.reason for one in found}
    assert reasons.pop("twice the workers").startswith("8 workers share 4 micro-batches")
    assert {None} == set(reasons.values())


def test_more_ranks_than_this_machine_has_slots_for_are_simulated_too():
    many = ("training_config.batch_size=80", "training_config.micro_batch_size=1", "multihost_config.num_workers=40")
    found = what_if(RunSpec("data_parallel", ranks=40, overrides=many), Conditions(), Unattended(), run=simulated)
    assert [40, 40, 40, 39, 80, 80] == [one.found and one.found.plan.world_size for one in found]


def test_more_ranks_than_a_simulation_takes_are_refused_without_advice_about_slots():
    with pytest.raises(LaunchError, match="room for 65,536 ranks") as refused:
        plan_simulation(RunSpec("data_parallel", ranks=10**11), Unattended(), has_room=True)
    assert ("`--ranks 65536`",) == refused.value.diagnostics[0].hints
