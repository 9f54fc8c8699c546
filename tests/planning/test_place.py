"""What `place` proposes: hosts move with their meshes, talking ranks come close, and nothing is ever made worse."""

from dataclasses import replace

import pytest

from ttlaunch.diagnostics import Diagnostic
from ttlaunch.planning.graph import traffic
from ttlaunch.planning.place import Cost, check_placement, propose_placement, render_cost
from ttlaunch.planning.roles import RoleLayout
from ttlaunch.recipe import Flow, Layout, all_pairs, chain

# The links of these clusters have two channels, so a message takes half a unit of time on each.


def pipeline(size):
    return RoleLayout(Layout("pipeline", stage=size), ("stage",) * size, (chain("stage"),))


def star(workers):
    roles = ("worker",) * workers + ("server",)
    return RoleLayout(Layout("star", worker=workers, server=1), roles, (Flow("worker", "server"),))


def test_a_pipeline_follows_the_cables(cluster):
    topology = cluster([(0, 1), (1, 2), (2, 3)], meshes=[0, 2, 1, 3])
    proposal = propose_placement(topology, pipeline(4))
    assert (Cost(0, 2.5), Cost(0, 1.5)) == (proposal.before, proposal.after)
    assert [0, 1, 2, 3] == [binding.mesh_id for binding in proposal.bindings]
    assert ["box-00", "box-02", "box-01", "box-03"] == [host.name for host in proposal.hosts]


def test_the_server_goes_to_the_middle_of_a_star(cluster):
    proposal = propose_placement(cluster([(0, 1), (0, 2), (0, 3)]), star(3))
    assert 0 == proposal.bindings[3].mesh_id
    assert Cost(0, 1.5) == proposal.after


def test_a_host_keeps_its_meshes(cluster):
    topology = cluster([(1, 0), (0, 2), (2, 3)], slots=[2, 2])
    proposal = propose_placement(topology, pipeline(4))
    cables = {binding.mesh_id: topology.slots[binding.rank].host.name for binding in topology.bindings}
    proposed = {binding.mesh_id: proposal.slots[rank].host.name for rank, binding in enumerate(proposal.bindings)}
    assert cables == proposed
    assert proposal.after < proposal.before


def test_a_host_that_the_ranks_do_not_fill_stays_last(cluster):
    topology = cluster([(0, 2), (2, 1)], meshes=[0, 1, 2], slots=[1, 1, 5])
    proposal = propose_placement(topology, pipeline(3))
    assert "box-02" == proposal.hosts[-1].name
    assert 2 == proposal.bindings[2].mesh_id


def test_a_host_without_ranks_stays_behind_the_others(cluster):
    topology = cluster([(0, 1), (0, 2)], meshes=[0, 1, 2], slots=[1, 1, 1, 4])
    proposal = propose_placement(topology, pipeline(3))
    assert ["box-01", "box-00", "box-02", "box-03"] == [host.name for host in proposal.hosts]


def test_a_path_for_every_pair_comes_before_few_hops(cluster):
    links = [(0, 1), (1, 2), (2, 3), (4, 5)]
    roles = ("worker", "worker", "server", "idle", "idle", "idle")
    layout = RoleLayout(Layout("x", worker=2, server=1, idle=3), roles, (Flow("worker", "server"),))
    topology = cluster(links, meshes=[0, 4, 5, 1, 2, 3])
    proposal = propose_placement(topology, layout)
    assert Cost(1, 0.5) == proposal.before
    assert Cost(0, 1) == proposal.after
    assert "0.5 and 1 without a path" == render_cost(proposal.before)


def test_weights_decide_which_flow_is_short(cluster):
    roles = ("a", "b", "c")
    layout = RoleLayout(Layout("x", a=1, b=1, c=1), roles, (Flow("a", "b"), Flow("a", "c"), Flow("b", "c", weight=9.0)))
    proposal = propose_placement(cluster([(0, 1), (1, 2)], meshes=[0, 2, 1][:3]), layout)
    heavy = next(pair for pair in proposal.pairs if (pair.a, pair.b) == (1, 2))
    assert (9.0, 1) == (heavy.weight, heavy.after)


def test_flows_between_the_same_ranks_add_up():
    layout = RoleLayout(Layout("x", a=1, b=1), ("a", "b"), (Flow("a", "b"), Flow("b", "a", weight=2.0)))
    assert {(0, 1): 3.0} == traffic(layout)


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_a_positive_number(weight):
    with pytest.raises(ValueError, match="the weight of a flow is a positive number"):
        Flow("a", "b", weight=weight)


def test_one_rank_costs_nothing(cluster):
    proposal = propose_placement(cluster([], meshes=[0]), pipeline(1))
    assert (Cost(0, 0), Cost(0, 0), False) == (proposal.before, proposal.after, proposal.improves)


def test_nothing_is_said_about_bindings_that_are_good_enough(cluster):
    topology = cluster([(0, 1), (1, 2), (2, 3)])
    assert [] == check_placement(topology, pipeline(4), recipe="x")


def test_bindings_that_cost_half_as_much_again_are_warned_of(cluster):
    topology = cluster([(0, 1), (0, 2), (0, 3)])
    (warning,) = check_placement(topology, star(3), recipe="x")
    assert "these bindings cost 2.5; another order of the hosts costs 1.5" == warning.message


def test_an_all_reduce_costs_the_same_in_every_order(cluster):
    layout = RoleLayout(Layout("all", peer=None), ("peer",) * 10, (all_pairs("peer"),))
    proposal = propose_placement(cluster([(i, i + 1) for i in range(9)]), layout)
    assert not isinstance(proposal, Diagnostic)
    assert proposal.before == proposal.after
    assert not any(proposal.moved(rank) for rank in range(10))


def test_a_link_with_many_channels_is_nearer_than_one_with_few(cluster):
    """Both orders have three hops; in the better one the heavy pair has the wide link."""
    topology = cluster([(0, 1), (1, 2)])
    wide = replace(topology, links=tuple(replace(link, channels=8 if link.a == 1 else 1) for link in topology.links))
    roles = ("a", "b", "c")
    layout = RoleLayout(Layout("x", a=1, b=1, c=1), roles, (Flow("a", "b", weight=9.0), Flow("b", "c")))
    proposal = propose_placement(wide, layout)
    assert (Cost(0, 9 + 1 / 8), Cost(0, 9 / 8 + 1)) == (proposal.before, proposal.after)


def test_bytes_that_are_given_count_in_place_of_declared_weights(cluster):
    topology = cluster([(0, 1), (1, 2)], meshes=[0, 2, 1])
    proposal = propose_placement(topology, pipeline(3), weights={(0, 1): 100.0, (1, 2): 1.0})
    assert 1 == next(pair for pair in proposal.pairs if pair.weight == 100.0).after
