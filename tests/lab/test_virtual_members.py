"""The members of an elastic run on a virtual clock, with made-up costs: who makes which steps, what that costs, and the verdict."""

import math

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import Source
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual_elastic_faults import Happening, judge_elastic
from ttlaunch.lab.virtual_members import VirtualMembers
from ttlaunch.lab.virtual_steps import StepsTogether
from ttlaunch.planning.fault_parser import parse_faults

MICRO_BATCHES = 8
LEAF_S, REST_S = 0.1, 0.05


class Costs:
    """Each micro-batch takes 0.1 s, the rest of a step 0.05 s, a byte 1 ms, and orders no time."""

    def __init__(
        self,
        *,
        servers=0,
        every=1,
        start_s=1.0,
        state_s=0.3,
        mean_s=0.01,
        most_means=4,
        waited_s=0.0,
        slow=None,
        pace_s=0.0,
    ):
        self._servers, self.every, self._waited_s, self._slow = servers, every, waited_s, slow or {}
        self._pace_s = pace_s
        self.start_s, self.notice_s, self.latency_s, self.most_means = start_s, 0.25, 0.0, most_means
        self.state_bytes, self.mean_bytes = round(state_s * 1e3), round(mean_s * 1e3)

    def step_s(self, members, *, agrees):
        return max(self._pace_s, agrees * REST_S + LEAF_S * math.ceil(MICRO_BATCHES / (len(members) - self._servers)))

    def task_s(self, number, _members):
        return MICRO_BATCHES * self.leaf_s(number) + self._waited_s

    def leaf_s(self, number):
        return LEAF_S * self._slow.get(number, 1.0)

    def transfers_s(self, gifts):
        return {number: sum(sizes.values()) / 1e3 for number, sizes in gifts.items()}


def run(
    text,
    *,
    ranks=2,
    elastic="1:3",
    steps=30,
    hostfile=None,
    lease_s=15.0,
    recipe="data_parallel",
    work=StepsTogether,
    **costs,
):
    """Run two workers with these faults; returns the members and the verdict."""
    spec = RunSpec(recipe, ranks=ranks, elastic=elastic, hostfile=hostfile)
    plan = plan_simulation(spec, Unattended(), has_room=True)
    faults, mistakes = parse_faults(Source("--plan", text)) if text else ([], [])
    assert [] == mistakes
    hosts = [row.host for row in plan.ranks]
    known = Costs(servers=plan.elastic.servers, **costs)
    members = VirtualMembers(plan.elastic, hosts=hosts, steps=steps, costs=known, work=work)
    happening = Happening(faults, plan.ranks, members, lease_s=lease_s)
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


def test_a_run_in_which_nobody_can_come_any_more_names_the_worker_that_the_others_did_not_outlive():
    """Three workers in a row end where they start, so no fourth one does."""
    text = "kill rank=1 at step=5; kill rank=3 at 3s; kill rank=5 at 4s; kill rank=7 at 5s"
    members, verdict = run(text, elastic="2:3", start_s=9.0)
    assert ("failed", "R004", 1) == (verdict.status, verdict.failure.code, verdict.failure.rank)
    assert (5, "named") == (members.steps_done, outcomes(verdict)[0])


def test_a_stopped_worker_is_killed_when_it_has_made_no_progress_for_long():
    members, verdict = run("stop rank=1 at step=5", ranks=3)
    assert ("worker-0001 made no progress for 5 s and was killed",) == members.epochs[1].reasons
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


@pytest.fixture
def three_hosts(tmp_path):
    """`three_hosts(text, …)`: a run of a worker on each of hosts a, b and c, whose steps take 0.35 s."""
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("a slots=1\nb slots=1\nc slots=1\n")
    return lambda text, **options: run(text, **{"ranks": 3, "steps": 60, "hostfile": hostfile, **options})


def outcomes(verdict):
    return [str(one.outcome) for one in verdict.faults]


def test_a_host_that_is_cut_off_makes_steps_with_the_others_until_its_lease_is_over(three_hosts):
    members, verdict = three_hosts("cut host=b at step=5", lease_s=4.0)
    at_s = 5 * 0.35 + 4.0
    assert [(0, (0, 1, 2)), (int(at_s / 0.35), (0, 2))] == epochs(members)
    assert ("worker-0001 was on a host that was lost",) == members.epochs[1].reasons
    assert ({"b": pytest.approx(at_s)}, {0, 1, 2}) == (members.away, set(members.processes))  # nobody starts there
    assert 5 == members.processes[1].reported
    assert ("done", 0, ["replaced"]) == (verdict.status, verdict.exit_status, outcomes(verdict))
    assert 4.0 == verdict.faults[0].detected_s


def test_a_worker_of_a_silent_host_counts_as_hung_before_the_lease_is_over_and_one_is_started_there_in_vain(
    three_hosts,
):
    members, verdict = three_hosts("cut host=b at step=5")
    assert [(0, (0, 1, 2)), (int((5 * 0.35 + 5.0) / 0.35), (0, 2))] == epochs(members)
    assert ("worker-0001 made no progress for 5 s and was killed",) == members.epochs[1].reasons
    assert ("was on a host that was lost", None) == (members.processes[4].why, members.processes[4].ready_s)
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_what_happens_on_a_host_that_is_cut_off_does_not_reach_it(three_hosts):
    text = "cut host=b at step=5; stop rank=1 at step=6; kill rank=1 at 2s; leave rank=1 at 3s; join at step=20; join at step=21"
    members, verdict = three_hosts(text, lease_s=4.0, elastic="1:5")
    # Asked to leave, it does not answer: no step is made until the others know that it is gone.
    assert "was on a host that was lost" == members.processes[1].why
    assert {0, 1, 2, 3} == set(members.processes)
    assert "rank 4 cannot start: host b is lost" == verdict.faults[-1].reason
    assert "done" == verdict.status


def test_a_run_that_needs_a_host_which_is_cut_off_waits_without_end(three_hosts):
    members, verdict = three_hosts("cut host=b at step=5", lease_s=4.0, elastic="3:3")
    assert [(0, (0, 1, 2))] == epochs(members)
    assert (True, "waiting") == (members.waits, verdict.status)
    assert verdict.exit_status is None
    assert verdict.failure is None
    assert (["awaited"], True) == (outcomes(verdict), verdict.is_right)
    assert 5 * 0.35 + 4.0 == pytest.approx(verdict.over_s, abs=LEAF_S)  # the others stop after a micro-batch


@pytest.mark.parametrize("lease_s", [4.0, 15.0])
def test_a_run_whose_hosts_are_all_cut_off_names_the_first(three_hosts, lease_s):
    """With the longer lease all workers count as hung before it is over, and the run ends when it is."""
    text = "cut host=b at step=5; cut host=a at step=5; cut host=c at step=5"
    _, verdict = three_hosts(text, lease_s=lease_s)
    assert 5 * 0.35 + lease_s == pytest.approx(verdict.over_s)
    assert ("failed", 7, "R012", "b") == (
        verdict.status,
        verdict.exit_status,
        verdict.failure.code,
        verdict.failure.host,
    )
    assert "named" == outcomes(verdict)[0]


def test_the_last_step_is_done_when_the_others_know_that_a_silent_host_is_gone(three_hosts):
    members, verdict = three_hosts("cut host=b at step=60", lease_s=4.0)
    assert 60 * 0.35 + 4.0 == pytest.approx(members.over_s)
    assert [3, 2] == [len(one.members) for one in members.epochs]
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_a_stopped_worker_that_is_continued_in_time_delays_the_others_and_nothing_else():
    members, verdict = run("stop rank=1 at step=5; continue rank=1 at 4s", ranks=3)
    assert [(0, (0, 1, 2))] == epochs(members)
    assert 30 * 0.35 + 4.0 - 5 * 0.35 == pytest.approx(members.over_s)
    assert ("done", ["endured", "endured"]) == (verdict.status, outcomes(verdict))


def test_a_stopped_worker_that_is_continued_too_late_has_been_killed():
    members, verdict = run("stop rank=1 at step=5; continue rank=1 at 9s", ranks=3)
    assert [(0, 1, 2), (0, 2), (0, 2, 4)] == [one.members for one in members.epochs]
    assert ["replaced", "not made"] == outcomes(verdict)


def test_a_stopped_worker_obeys_when_it_is_continued():
    """Another one is killed while it is stopped: the others wait for its answer."""
    members, verdict = run("stop rank=1 at step=5; kill rank=2 at 2s; continue rank=1 at 4s", ranks=3)
    assert 4.0 == pytest.approx(members.epochs[1].at_s, abs=LEAF_S)
    assert (0, 1) == members.epochs[1].members
    assert ["endured", "replaced", "endured"] == outcomes(verdict)


def test_a_joining_worker_that_is_stopped_goes_on_where_it_was():
    alone, _ = run("join at 0.1s")
    members, _ = run("stop rank=2 at 1.5s; join at 0.1s; continue rank=2 at 6s")
    assert 0 < alone.epochs[1].step < members.epochs[1].step
    assert (0, 1, 2) == members.epochs[1].members


def test_the_shadow_of_a_killed_optimizer_keeps_its_place_and_a_worker_takes_the_other():
    members, verdict = run("kill rank=0 at step=5", recipe="hierarchical_parallel", ranks=4, elastic="3:4")
    assert [(0, 1, 2, 3), (2, 1, 3), (2, 1, 3, 4)] == [one.members for one in members.epochs]
    taker, comer = members.processes[2], members.processes[4]
    assert ([1, 0], 300, [1, 0], 10) == (
        taker.taken,
        taker.got,
        comer.taken,
        comer.got,
    )  # a worker needs only the weights
    # Nobody follows: those that make steps wait until the worker that comes has the weights.
    assert 0.1 < members.epochs[2].lost_s
    assert all((0, 0) in one.blocks for one in members.epochs)
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_an_owner_of_a_state_that_ends_with_its_shadow_ends_the_run():
    text = "kill rank=0 at step=5; kill rank=1 at step=5"
    _, verdict = run(text, recipe="hierarchical_parallel", ranks=4, elastic="3:4")
    assert ("failed", "R075") == (verdict.status, verdict.failure.code)
    assert "the worker that owned it and its shadow ended together" in verdict.failure.message


def test_slots_are_cut_anew_for_the_members_that_are_left():
    members, verdict = run("kill rank=1 at step=5", recipe="zero", ranks=3, elastic="1:3", state_s=3.6, mean_s=1.2)
    assert [(0, 1, 2), (0, 2), (0, 2, 4)] == [one.members for one in members.epochs]
    # Worker 0 had slots 0 and 2 of three and worker 2 slots 2 and 1: then both have all, and worker 4 gets two thirds.
    assert [2400, 1200] == [members.processes[4].got, members.processes[0].got]
    assert MICRO_BATCHES == members.epochs[1].computed_anew
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_workers_with_steps_of_their_own_end_the_one_that_they_make_and_lose_those_of_one_that_ends():
    """They agree after every 8 steps; worker 1 is killed after step 13."""
    members, verdict = run("kill rank=1 at step=13", recipe="local_sgd", ranks=2, every=8, start_s=1.0)
    assert [(0, (0, 1)), (13, (0,)), (15, (0, 3))] == epochs(members)
    alone = members.epochs[1]
    assert (5, 0) == (alone.lost_steps, alone.computed_anew)
    began_s = 13 * 4 * LEAF_S + REST_S
    assert began_s + 4 * LEAF_S == pytest.approx(alone.at_s)  # step 14 was under way, and counts
    assert alone.at_s == pytest.approx(alone.done_s)
    # Steps 15 and 16 are made alone, and ended before the one that comes takes part, from the agreement after step 8 on.
    assert alone.at_s + 16 * LEAF_S == pytest.approx(members.epochs[2].at_s)
    assert members.epochs[2].at_s + 0.3 + REST_S == pytest.approx(members.epochs[2].done_s)
    assert ([1, 0], 300) == (members.processes[3].taken, members.processes[3].got)
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_others_make_steps_of_their_own_without_a_stopped_worker_until_they_agree():
    """They agree after every 8 steps; worker 1 is stopped after step 13, when 14 and 15 are still to be made alone."""
    members, verdict = run("stop rank=1 at step=13", recipe="local_sgd", ranks=2, every=8)
    assert [(0, (0, 1)), (15, (0,))] == epochs(members)[:2]
    assert 5 == members.epochs[1].lost_steps  # those of worker 1 after step 8
    assert ("done", ["replaced"]) == (verdict.status, outcomes(verdict))


def test_a_worker_that_is_continued_makes_the_steps_that_others_have_made_alone():
    members, verdict = run("stop rank=1 at step=13; continue rank=1 at 8s", recipe="local_sgd", ranks=2, every=8)
    assert [(0, (0, 1))] == epochs(members)
    # It makes steps 14 to 16 from then on, while the other one waits to agree.
    until_agreed, after = 8.0 + 3 * 4 * LEAF_S + REST_S, 14 * 4 * LEAF_S + 2 * REST_S
    assert until_agreed + after == pytest.approx(members.over_s)
    assert ("done", ["endured", "endured"]) == (verdict.status, outcomes(verdict))


def test_one_that_waits_because_there_is_no_place_is_named_when_it_takes_part():
    members, _ = run("join at step=1; join at step=1; kill rank=0 at step=9", start_s=1.0)
    assert [(0, 1), (0, 1, 2), (1, 2, 3)] == [one.members for one in members.epochs]
    joined = [[reason for reason in one.reasons if "joined" in reason] for one in members.epochs[1:]]
    assert [["worker-0002 joined"], ["worker-0003 joined"]] == joined
