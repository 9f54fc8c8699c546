"""The verdict on faults of a virtual clock, from how its ranks ended: judged by the functions that judge runs."""

import pytest

from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.diagnostics import LaunchError, Source
from ttlaunch.lab.simulate import plan_simulation
from ttlaunch.lab.virtual_faults import Patience, check_virtual_faults, judge_virtually, order_faults
from ttlaunch.planning.fault_parser import parse_faults
from ttlaunch.records.virtual import Span, VirtualClass, VirtualEnd, VirtualError, VirtualMade

HOSTS = "a slots=2\nb slots=2\n"


@pytest.fixture
def plan(tmp_path):
    """Four workers on two hosts."""
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text(HOSTS)
    spec = RunSpec("data_parallel", overrides=["multihost_config.num_workers=4"], hostfile=hostfile)
    return plan_simulation(spec, Unattended(), has_room=True)


def faults(text):
    found, mistakes = parse_faults(Source("--plan", text))
    assert [] == mistakes
    return found


def ends(*ranks, made=(), errors=()):
    """How four ranks ended, each given as how, last step and last second."""
    classes = tuple(
        VirtualClass(
            members=(Span(first=rank, last=rank),),
            steps=step,
            all_s=last_s,
            computing_s=last_s,
            exposed_s=0.0,
            waiting_s=0.0,
            each_s=(),
            facts={},
            end=end,
            last_step=step,
            last_s=last_s,
        )
        for rank, (end, step, last_s) in enumerate(ranks)
    )
    happened = tuple(
        VirtualMade(index=index, at_s=at_s, step=5, ranks=tuple(Span(first=rank, last=rank) for rank in hit))
        for index, at_s, hit in made
    )
    return VirtualEnd(
        classes=classes,
        edges=(),
        findings=(),
        flops_per_s=1.0,
        not_folded=None,
        made=happened,
        errors=tuple(errors),
    )


WAITS = ("waits", 5, 1.2)
DONE = ("done", 9, 2.0)
CASES = {
    "kill rank=1 at step=5": (ends(WAITS, ("ended", 5, 1.0), WAITS, WAITS, made=[(0, 1.0, [1])]), "R004", 1, None),
    "segv rank=2 at step=5": (ends(WAITS, WAITS, ("ended", 5, 1.0), WAITS, made=[(0, 1.0, [2])]), "R004", 2, None),
    "kill shim=3 at step=5": (ends(WAITS, WAITS, WAITS, ("ended", 5, 1.0), made=[(0, 1.0, [3])]), "R006", 3, None),
    "stop rank=0 at step=5": (ends(("stopped", 5, 1.0), WAITS, WAITS, WAITS, made=[(0, 1.0, [0])]), "R013", 0, None),
    "kill mpirun at step=5": (ends(DONE, DONE, DONE, DONE, made=[(0, 1.0, [])]), "R008", None, None),
    "cut host=b at step=5": (ends(DONE, DONE, DONE, DONE, made=[(0, 1.0, [])]), "R012", None, "b"),
}


@pytest.mark.parametrize("text", CASES)
def test_a_fault_gets_the_code_and_the_rank_or_host_of_a_run(plan, text):
    end, code, rank, host = CASES[text]
    found = judge_virtually(plan, faults(text), end, patience=Patience(lease_s=5.0, hang_timeout_s=3.0))
    assert ["named"] == [str(one.outcome) for one in found.faults]
    assert found.failure is not None
    assert (code, rank) == (found.failure.code, found.failure.rank)
    assert host is None or host == found.failure.host
    assert found.is_right


def test_the_first_fault_ends_the_run_and_later_ones_are_not_made(plan):
    end = ends(("ended", 8, 1.9), ("ended", 5, 1.0), WAITS, WAITS, made=[(0, 1.9, [0]), (1, 1.0, [1])])
    found = judge_virtually(plan, faults("kill rank=0 at step=8; kill rank=1 at step=5"), end, patience=Patience())
    assert ["not made", "named"] == [str(one.outcome) for one in found.faults]
    assert (1, 1.25) == (found.failure.rank, found.over_s)


def test_a_stop_that_is_continued_in_time_is_endured_and_one_that_is_not_hangs(plan):
    late = ("done", 9, 6.0)
    end = ends(late, late, late, late, made=[(0, 1.0, [1]), (1, 4.5, [1])])
    both = faults("stop rank=1 at 1s; continue rank=1 at 4.5s")
    endured = judge_virtually(plan, both, end, patience=Patience(hang_timeout_s=5.0))
    assert ("done", ["endured", "endured"]) == (endured.status, [str(one.outcome) for one in endured.faults])
    hung = judge_virtually(plan, both, end, patience=Patience(hang_timeout_s=3.0))
    assert ("hung", 6, "R013", 1) == (hung.status, hung.exit_status, hung.failure.code, hung.failure.rank)


def test_an_exception_of_a_rank_is_named_with_its_line(plan):
    raised = VirtualError(
        rank=2, at_s=1.0, type="ValueError", module="builtins", message="no", file="trainer.py", line=7
    )
    end = ends(WAITS, WAITS, ("waits", 5, 1.0), WAITS, errors=[raised])
    found = judge_virtually(plan, (), end, patience=Patience())
    assert ("R002", 2, "trainer.py:7") == (found.failure.code, found.failure.rank, found.failure.place)


def test_ctrl_c_is_no_failure(plan):
    end = ends(DONE, DONE, DONE, DONE, made=[(0, 1.0, [])])
    found = judge_virtually(plan, faults("interrupt at step=5"), end, patience=Patience())
    assert ("interrupted", 130, None) == (found.status, found.exit_status, found.failure)
    assert found.is_right


def test_faults_that_need_values_or_an_elastic_run_are_refused(plan):
    with pytest.raises(LaunchError) as refused:
        check_virtual_faults(faults("flip rank=1 at step=5; join at step=3; kill rank=9 at step=1"), plan)
    assert [
        "`join` needs a run whose workers come and go",
        "`rank=9` is not in this run",
        "`flip rank=1 at step=5` cannot be simulated",
    ] == [one.message for one in refused.value.diagnostics]


def test_faults_of_roles_and_hosts_hit_their_ranks_and_others_only_mark_a_moment(plan):
    found = order_faults(faults("kill host=b at step=5; cut host=a at 2.5s; stop role=worker at 1s"), plan)
    assert [("end", [2, 3], 5, 0.0), ("note", [], 0, 2.5), ("stop", [0, 1, 2, 3], 0, 1.0)] == [
        (one["deed"], [span["first"] for span in one["ranks"]], one["step"], one["at_s"]) for one in found
    ]
