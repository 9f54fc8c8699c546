"""Faults drawn at random: they fit the run, are the same for a seed, and can be typed again."""

import pytest

from ttlaunch.diagnostics import Source
from ttlaunch.lab.chaos.experiment import draw_faults
from ttlaunch.planning.fault_checks import FaultScope, check_faults
from ttlaunch.planning.fault_parser import parse_faults
from ttlaunch.planning.faults import Kind, Verb, render_faults
from ttlaunch.planning.launch_plan import RankRow

ROWS = (RankRow(0, "a", 0, "worker"), RankRow(1, "a", 1, "worker"), RankRow(2, "b", 0, "optimizer"))
HERE = FaultScope(tuple(RankRow(row.rank, "localhost", row.rank, row.role) for row in ROWS), is_here=True, last_step=60)
THERE = FaultScope(ROWS, is_here=False, last_step=60)


@pytest.mark.parametrize("scope", [HERE, THERE, FaultScope(ROWS, is_here=False, takes_steps=False)])
def test_drawn_faults_fit_the_run_and_are_the_same_for_a_seed(scope):
    drawn = draw_faults(scope, count=200, seed=7)
    assert 200 == len(drawn)
    assert [] == list(check_faults(drawn, scope))
    assert (drawn, []) == parse_faults(Source("--plan", render_faults(drawn)))
    assert drawn == draw_faults(scope, count=200, seed=7)
    assert drawn != draw_faults(scope, count=200, seed=8)
    kinds = {(fault.verb, fault.target.kind) for fault in drawn}
    assert scope.is_here == ((Verb.CUT, Kind.HOST) not in kinds)
