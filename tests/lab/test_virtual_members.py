"""The members of an elastic run on a virtual clock, with made-up costs: who makes which steps, what that costs, and the verdict."""

import math

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Source
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual_elastic_faults import Happening, judge_elastic
from ttlaunch.lab.virtual_members import VirtualMembers
from ttlaunch.planning.fault_parser import parse_faults

MICRO_BATCHES = 8
LEAF_S, REST_S = 0.1, 0.05


class Costs:
    """Each micro-batch takes 0.1 s, the rest of a step 0.05 s, and orders no time."""

    def __init__(self, *, start_s=1.0, state_s=0.3, mean_s=0.01, most_means=4):
        self.start_s, self.notice_s, self.latency_s, self.most_means = start_s, 0.25, 0.0, most_means
        self._state_s, self._mean_s = state_s, mean_s

    def step_s(self, members):
        return LEAF_S * math.ceil(MICRO_BATCHES / len(members)) + REST_S

    def leaf_s(self, _number):
        return LEAF_S

    def state_s(self, _number, _members):
        return self._state_s

    def mean_s(self, _number, _members):
        return self._mean_s


def run(text, *, ranks=2, elastic="1:3", steps=30, **costs):
    """Run two workers with these faults; returns the members and the verdict."""
    plan = plan_simulation(RunSpec("data_parallel", ranks=ranks, elastic=elastic), Unattended(), has_room=True)
    faults, mistakes = parse_faults(Source("--plan", text)) if text else ([], [])
    assert [] == mistakes
    hosts = [row.host for row in plan.ranks]
    members = VirtualMembers(plan.elastic, hosts=hosts, steps=steps, costs=Costs(**costs))
    happening = Happening(faults, plan.ranks, members)
    members.run()
    return members, judge_elastic(plan, faults, members, happening=happening)


def epochs(members):
    return [(one.step, one.members) for one in members.epochs]


def test_without_a_change_a_run_takes_as_many_steps_as_it_makes():
    members, verdict = run("")
    assert [(0, (0, 1))] == epochs(members)
    assert 30 * (4 * LEAF_S + REST_S) == pytest.approx(members.over_s)
    assert ("done", 0) == (verdict.status, verdict.exit_status)


def test_the_others_compute_what_a_killed_worker_had_and_one_starts_in_its_place():
    members, verdict = run("kill rank=1 at step=5")
    assert [(0, (0, 1)), (5, (0,)), (7, (0, 3))] == epochs(members)
    _, alone, with_it = members.epochs
    # It was killed as step 5 was over: the other one has 3 of its 4 micro-batches when it knows of it 0.25 s later, and computes 5.
    assert (5, ("worker-0001 was killed by SIGKILL",)) == (alone.computed_anew, alone.reasons)
    died_s = 5 * (4 * LEAF_S + REST_S)
    assert died_s + 0.3 == pytest.approx(alone.at_s)
    assert died_s + 0.3 + 5 * LEAF_S + REST_S == pytest.approx(alone.done_s)
    assert 0.0 == pytest.approx(alone.lost_s)  # a step alone takes as long
    assert ((0, 3), ("worker-0003 joined",)) == (with_it.members, with_it.reasons)
    assert (30, 30) == (members.steps_done, sum(one.steps for one in members.epochs))
    assert ("done", ["replaced"]) == (verdict.status, [str(one.outcome) for one in verdict.faults])
    assert 0.25 == pytest.approx(verdict.faults[0].detected_s)


def test_a_worker_that_joins_follows_before_it_takes_part_and_nobody_waits():
    members, _ = run("join at step=3")
    before, after = members.epochs
    joined = members.processes[2]
    began_s = 3 * 0.45
    # Ready after 1 s; the state is that after step 6, which is under way then; then it makes one backward pass.
    state_s = 6 * 0.45
    assert (began_s, state_s + 0.3 + LEAF_S) == (pytest.approx(joined.started_s), pytest.approx(joined.ready_s))
    assert ([1, 0], 6) == (joined.taken, after.step)
    assert (before.members, after.members) == ((0, 1), (0, 1, 2))
    assert 6 * 0.45 + 4 * LEAF_S == pytest.approx(after.at_s)  # all micro-batches of step 7 were under way


def test_what_others_make_meanwhile_is_applied_as_mean_gradients():
    members, _ = run("join at step=3", state_s=1.0)
    assert [1, 2] == members.processes[2].taken
    assert 8 == members.epochs[1].step


def test_one_that_falls_behind_takes_the_whole_state_again_and_in_the_end_the_others_wait():
    members, _ = run("join at step=3", steps=60, state_s=2.5, most_means=4)
    states, _ = members.processes[2].taken
    assert (6, (0, 1, 2)) == (states, members.epochs[1].members)
    assert members.epochs[1].lost_s > 2.5


def test_one_that_leaves_goes_at_once_and_what_it_has_is_computed_again():
    members, verdict = run("leave rank=0 at step=4")
    assert [(0, (0, 1)), (4, (1,))] == epochs(members)
    assert ("left", ["endured"]) == (members.processes[0].why, [str(one.outcome) for one in verdict.faults])


def test_a_worker_without_which_too_few_are_left_cannot_leave():
    members, verdict = run("leave rank=1 at step=4", elastic="2:3")
    assert [(0, (0, 1))] == epochs(members)
    [fault] = verdict.faults
    assert "worker-0001 cannot leave: a step needs 2 workers, and without it 1 is left" == fault.reason
    assert "not made" == str(fault.outcome)


def test_no_step_is_made_with_fewer_than_the_minimum_until_another_one_is_ready():
    members, verdict = run("kill rank=1 at step=5", elastic="2:3")
    assert [(0, (0, 1)), (5, (0, 3))] == epochs(members)
    change = members.epochs[1]
    assert 5 * 0.45 + 0.25 + 1.0 == pytest.approx(change.at_s)
    assert change.lost_s > 1.0
    assert ("done", ["replaced"]) == (verdict.status, [str(one.outcome) for one in verdict.faults])


def test_a_run_whose_workers_all_end_fails_as_a_run_does():
    _, verdict = run("kill role=worker at step=5")
    assert ("failed", 1, "R004", 0) == (verdict.status, verdict.exit_status, verdict.failure.code, verdict.failure.rank)
    assert ["named"] == [str(one.outcome) for one in verdict.faults]


def test_a_run_in_which_nobody_can_come_any_more_ends_with_r075():
    """Three workers in a row end where they start, so no fourth one does."""
    text = "kill rank=1 at step=5; kill rank=3 at 3s; kill rank=5 at 4s; kill rank=7 at 5s"
    members, verdict = run(text, elastic="2:3", start_s=9.0)
    assert ("failed", "R075") == (verdict.status, verdict.failure.code)
    assert "1 worker is left, and a step needs 2" in verdict.failure.message
    assert 5 == members.steps_done


def test_a_stopped_worker_is_killed_when_it_has_made_no_progress_for_long():
    members, verdict = run("stop rank=1 at step=5", ranks=3)
    assert ("worker-0001 made no progress for 5.0 s and was killed",) == members.epochs[1].reasons
    assert ["replaced"] == [str(one.outcome) for one in verdict.faults]


def test_a_fault_for_a_worker_that_was_never_started_is_not_made():
    _, verdict = run("kill rank=9 at step=5")
    assert [("not made", "the run had ended")] == [(str(one.outcome), one.reason) for one in verdict.faults]


def test_a_spare_takes_part_when_there_is_room():
    members, _ = run("join at step=2; kill rank=0 at step=20", elastic="1:2")
    assert (0, 1) == members.epochs[0].members
    assert (1, 2) == members.epochs[-1].members
    assert 2 < len(members.epochs)  # alone first, then with the spare, which gets the state only then


def test_each_micro_batch_counts_once_whoever_comes_and_goes():
    text = "join at 0.61s; kill rank=0 at 2.03s; leave rank=2 at 4.4s; segv rank=1 at 5.15s; join at step=12"
    members, verdict = run(text, ranks=3, elastic="1:4", steps=40, state_s=0.05)
    assert ("done", 40) == (verdict.status, sum(one.steps for one in members.epochs))
    assert 5 <= len(members.epochs)
    assert all(sum(b - a for a, b in one.blocks) == MICRO_BATCHES for one in members.epochs)
    assert all(0 <= one.computed_anew <= MICRO_BATCHES for one in members.epochs)
