"""`place --step-time`: bytes of a simulated step decide, and so does the step in the proposed order. The simulation has its own tests."""

from dataclasses import replace

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.resolve import resolve
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.lab.place import StepTimes, place_by_time
from ttlaunch.lab.virtual import Conditions, StepTime, VirtualRun
from ttlaunch.planning.routes import network_of

SPEC = RunSpec("hierarchical_parallel", on="5loudboxes", overrides=("multihost_config.num_workers=3",))


def simulated(heavy, *, gain, plans):
    """Times that follow from how many links the heavy pair of ranks has between its meshes."""

    def run(plan, conditions):
        plans.append(plan)
        network = network_of(plan, over_links=conditions.over_links)
        a, b = (network.places[rank] for rank in heavy)
        step_ms = 10.0 + gain * len(network.routes.get((a, b), ()))
        groups = [StepTime(((rank, rank),), "x", 3, step_ms, 1.0, 1.0, 0.0, (step_ms,)) for rank in range(5)]
        edges = [{"source": heavy[0], "dest": heavy[1], "peers": 1, "messages": 1, "bytes": 9, "step_bytes": 9}]
        return VirtualRun(plan, conditions, tuple(groups), step_ms, tuple(edges), 1, 9, 0, None, None)

    return run


def placed(*, gain):
    """The answer for the two ranks that are farthest apart now."""
    found, plans = resolve(SPEC), []
    hops = {(pair.a, pair.b): pair.before or 0 for pair in _today(found.topology, found.layout).pairs}
    heavy = max(hops, key=hops.get)
    run = simulated(heavy, gain=gain, plans=plans)
    given = {"conditions": Conditions(), "dialogue": Unattended(), "run": run}
    return heavy, hops[heavy], plans, place_by_time(SPEC, found.topology, found.layout, **given)


def _today(topology, layout):
    from ttlaunch.planning.place import propose_placement  # noqa: PLC0415 - only its distances

    pairs = {(a, b): 1.0 for a in range(5) for b in range(a + 1, 5)}
    return propose_placement(topology, layout, weights=pairs)


def test_ranks_that_send_most_come_together_and_both_steps_are_told():
    heavy, hops, plans, (proposal, times) = placed(gain=1.0)
    assert 1 < hops
    assert StepTimes(10.0 + hops, 11.0) == times
    assert {heavy: (3.0, hops, 1)} == {(p.a, p.b): (p.weight, p.before, p.after) for p in proposal.pairs}
    before, after = ([row.mesh_id for row in plan.ranks] for plan in plans)
    assert (sorted(before), [binding.mesh_id for binding in proposal.bindings]) == (sorted(after), after)


def test_an_order_that_makes_no_step_quicker_is_not_proposed():
    _, hops, plans, (proposal, times) = placed(gain=-1.0)
    assert StepTimes(10.0 - hops, 10.0 - hops) == times
    assert (2, False) == (len(plans), proposal.improves)
    topology = resolve(replace(SPEC)).topology
    assert (topology.bindings, topology.hosts) == (proposal.bindings, proposal.hosts)
