"""What a run under ordered faults proves, from its history and report alone."""

import pytest

from ttlaunch.diagnostics import Source
from ttlaunch.lab.chaos.verdict import judge_faults
from ttlaunch.planning.fault_parser import parse_faults

START = 1000.0


def failed(kind, *, rank=None, host=None, code="R004", time=START + 5.2):
    failure = {"class": kind, "rank": rank, "host": host, "code": code, "time": time}
    return {"status": "failed", "failure": failure}


DONE = {"status": "done", "failure": None}
INTERRUPTED = {"status": "interrupted", "failure": None}


def judged(plan, made, report, *, missed=(), extra=(), end=START + 6.0, engine_failed=False):
    """The verdicts on a plan of which some faults were made: index, seconds after the start, ranks."""
    faults, found = parse_faults(Source("--plan", plan))
    assert [] == found
    events = [{"event": "start", "time": START}]
    events += [
        {"event": "fault", "time": START + at_s, "index": index, "ranks": ranks, "step": 7}
        for index, at_s, ranks in made
    ]
    events += [
        {"event": "fault_missed", "time": START + 5, "index": index, "reason": reason} for index, reason in missed
    ]
    events += [*extra, {"event": "end", "time": end}]
    return judge_faults(faults, events, report, engine_failed=engine_failed)


def outcomes(*args, **options):
    return [str(verdict.outcome) for verdict in judged(*args, **options)]


def test_a_killed_rank_that_is_named_has_its_times():
    (verdict,) = judged("kill rank=2 at step=5", [(0, 5.0, [2])], failed("killed", rank=2))
    assert {
        "fault": "kill rank=2 at step=5",
        "outcome": "named",
        "reason": None,
        "ranks": [2],
        "step": 7,
        "at_s": 5.0,
        "detected_s": 0.2,
        "over_s": 1.0,
    } == verdict.as_json()


RIGHT = {
    "segv role=worker at 5s": ([0, 1], failed("crashed", rank=1)),
    "term rank=1 at 5s": ([1], failed("raised", rank=1, code="R002")),
    "stop rank=1 at 5s": ([1], {**failed("hung", rank=1, code="R013"), "status": "hung"}),
    "flip rank=1 at step=5": ([1], failed("replicas_differ", rank=1, code="R009")),
    "kill shim=1 at 5s": ([1], failed("shim_lost", rank=1, code="R006")),
    "kill mpirun at 5s": ([], failed("other", code="R008")),
    "cut host=b at 5s": ([], failed("host_lost", host="b", code="R012")),
    "kill agent=b at 5s": ([], failed("host_lost", host="b", code="R012")),
    "interrupt at 5s": ([], INTERRUPTED),
    "term launcher at 5s": ([], {"status": "terminated", "failure": None}),
}


@pytest.mark.parametrize("plan", RIGHT)
def test_a_fault_is_named_by_what_it_does(plan):
    ranks, report = RIGHT[plan]
    engine_failed = plan == "kill mpirun at 5s"
    assert ["named"] == outcomes(plan, [(0, 5.0, ranks)], report, engine_failed=engine_failed)
    assert ["unnoticed"] == outcomes(plan, [(0, 5.0, ranks)], DONE)
    assert ["misnamed"] == outcomes(plan, [(0, 5.0, ranks)], failed("raised", rank=3, code="R002"))


def test_a_flipped_bit_is_named_too_where_no_majority_can_blame_a_rank():
    plan, made = "flip rank=1 at step=5", [(0, 5.0, [1])]
    assert ["named"] == outcomes(plan, made, failed("replicas_differ", code="R009"))
    assert ["misnamed"] == outcomes(plan, made, failed("replicas_differ", rank=0, code="R009"))


def test_the_right_class_of_the_wrong_rank_is_wrong_and_so_is_the_other_way_round():
    assert ["misnamed"] == outcomes("kill rank=2 at 5s", [(0, 5.0, [2])], failed("killed", rank=1))
    assert ["misnamed"] == outcomes("kill rank=2 at 5s", [(0, 5.0, [2])], failed("crashed", rank=2))
    assert ["misnamed"] == outcomes("cut host=b at 5s", [(0, 5.0, [])], failed("host_lost", host="a", code="R012"))


def test_the_first_fault_that_breaks_the_run_must_be_named():
    plan, made = "kill rank=2 at step=5; segv rank=1 at step=9", [(0, 5.0, [2]), (1, 5.5, [1])]
    assert ["named", "overtaken"] == outcomes(plan, made, failed("killed", rank=2))
    assert ["misnamed", "overtaken"] == outcomes(plan, made, failed("crashed", rank=1))


def test_of_faults_at_one_moment_either_may_be_named():
    plan, made = "kill rank=2 at step=5; segv rank=1 at step=5", [(0, 5.0, [2]), (1, 5.01, [1])]
    assert ["overtaken", "named"] == outcomes(plan, made, failed("crashed", rank=1))


def test_a_stopped_rank_breaks_the_run_only_if_nothing_else_does():
    plan, made = "stop rank=1 at 5s; kill rank=2 at 6s", [(0, 5.0, [1]), (1, 6.0, [2])]
    assert ["overtaken", "named"] == outcomes(plan, made, failed("killed", rank=2, time=START + 6.1))
    hung = {**failed("hung", rank=1, code="R013"), "status": "hung"}
    assert ["named", "not made"] == outcomes(plan, made[:1], hung)


def test_a_rank_that_is_let_go_on_is_endured():
    plan, made = "stop rank=1 at 5s; continue rank=1 at 6s", [(0, 5.0, [1]), (1, 6.0, [1])]
    assert ["endured", "endured"] == outcomes(plan, made, DONE)
    assert ["misnamed", "misnamed"] == outcomes(plan, made, failed("raised", rank=1))


def test_a_stopped_rank_takes_a_signal_when_it_goes_on():
    plan = "stop rank=1 at 1s; segv rank=1 at 2s; kill rank=2 at 3s; continue rank=1 at 4s"
    made = [(0, 1.0, [1]), (1, 2.0, [1]), (2, 3.0, [2]), (3, 4.0, [1])]
    assert ["endured", "overtaken", "named", "endured"] == outcomes(plan, made, failed("killed", rank=2))


def test_several_interrupts_are_all_named():
    made = [(0, 1.0, []), (1, 2.0, [])]
    assert ["named", "named"] == outcomes("interrupt at 1s; interrupt at 2s", made, INTERRUPTED)


def test_what_could_not_be_made_says_why():
    found = judged("kill rank=2 at 5s; kill rank=1 at 50s", [], DONE, missed=[(0, "rank 2 had ended")])
    assert [("not made", "rank 2 had ended"), ("not made", "the run had ended")] == [
        (str(verdict.outcome), verdict.reason) for verdict in found
    ]


def test_a_lost_host_is_detected_when_something_follows_from_it():
    extra = [{"event": "ending", "time": START + 14.0}]
    report = failed("host_lost", host="b", code="R012", time=START + 3.9)
    (verdict,) = judged("cut host=b at 5s", [(0, 5.0, [])], report, extra=extra, end=START + 15.0)
    assert (9.0, 10.0) == (verdict.detected_s, verdict.over_s)


def test_a_hang_that_was_seen_before_another_fault_came_is_named():
    plan, made = "stop rank=1 at 1s; kill mpirun at 5.5s", [(0, 1.0, [1]), (1, 5.5, [])]
    hung = {**failed("hung", rank=1, code="R013", time=START + 5.2), "status": "hung"}
    assert ["named", "overtaken"] == outcomes(plan, made, hung)
    assert ["overtaken", "misnamed"] == outcomes(plan, [(0, 1.0, [1]), (1, 4.0, [])], hung)


def test_a_host_that_is_silent_for_a_while_may_be_overtaken():
    plan, made = "cut host=b at 1s; kill rank=2 at 5s", [(0, 1.0, []), (1, 5.0, [2])]
    assert ["overtaken", "named"] == outcomes(plan, made, failed("killed", rank=2))
    assert ["named", "overtaken"] == outcomes(plan, made, failed("host_lost", host="b", code="R012", time=START + 0.9))
    late = [(0, 1.0, []), (1, 22.0, [2])]
    assert ["misnamed", "overtaken"] == outcomes(plan, late, failed("killed", rank=2, time=START + 22.1))


def test_a_run_that_had_broken_by_itself_is_no_fault_of_the_fault():
    broken = failed("raised", rank=0, code="R002", time=START + 4.0)
    assert ["overtaken"] == outcomes("kill mpirun at 5s", [(0, 5.0, [])], broken)


def epoch(at_s, *members):
    return {"time": START + at_s, "members": list(members)}


ELASTIC = {**DONE, "epochs": [epoch(1, 0, 1, 2), epoch(5.2, 0, 2)]}


def lost(number, at_s):
    return {"event": "worker_lost", "time": START + at_s, "worker": f"worker-{number:04d}", "reason": "was killed"}


def test_workers_of_an_elastic_run_are_replaced_if_the_run_knew_of_their_end_and_made_all_steps():
    plan, made = "kill rank=1 at step=5; stop rank=2 at step=6", [(0, 5.0, [1]), (1, 6.0, [2])]
    first, second = judged(plan, made, ELASTIC, extra=[lost(1, 5.1), lost(2, 11.2)], end=START + 20)
    assert ("replaced", 0.1, None) == (str(first.outcome), first.detected_s, first.over_s)
    assert ("replaced", 5.2) == (str(second.outcome), second.detected_s)


def test_a_worker_whose_end_was_not_noticed_is_not_replaced():
    plan, made = "kill role=worker at step=5", [(0, 5.0, [1, 2])]
    assert ["unnoticed"] == outcomes(plan, made, ELASTIC, extra=[lost(1, 5.1)])
    assert ["unnoticed"] == outcomes(plan, made, ELASTIC, extra=[lost(1, 5.1), lost(2, 1.0)])  # that was another time
    assert ["unnoticed"] == outcomes(plan, made, DONE, extra=[lost(1, 5.1), lost(2, 5.1)])  # the run was not elastic


def test_the_last_worker_of_an_elastic_run_is_named():
    report = {**failed("killed", rank=1), "epochs": [epoch(1, 1)]}
    assert ["named"] == outcomes("kill rank=1 at step=5", [(0, 5.0, [1])], report, extra=[lost(1, 5.1)])


def test_a_worker_that_others_went_on_without_is_replaced_although_a_later_fault_ended_the_run():
    plan, made = "term rank=1 at step=5; kill mpirun at step=9", [(0, 5.0, [1]), (1, 8.0, [])]
    report = {**failed("other", code="R008", time=START + 8.1), "epochs": ELASTIC["epochs"]}
    options = {"extra": [lost(1, 5.1)], "engine_failed": True, "end": START + 9}
    assert ["replaced", "named"] == outcomes(plan, made, report, **options)
    unchanged = {**report, "epochs": ELASTIC["epochs"][:1]}
    assert ["misnamed", "overtaken"] == outcomes(plan, made, unchanged, **options)


@pytest.mark.parametrize("plan", ["cut host=b at 5s", "kill agent=b at 5s"])
def test_an_elastic_run_that_went_on_without_a_host_has_replaced_its_workers(plan):
    """Worker 4 was to start in place of worker 1 before the host was lost."""
    report = {**ELASTIC, "ranks": [{"rank": rank, "host": "b" if rank in {1, 4} else "a"} for rank in (0, 1, 2, 4)]}
    (found,) = judged(plan, [(0, 5.0, [])], report, extra=[lost(1, 5.1), lost(4, 20.0)])
    assert ("replaced", 0.1) == (str(found.outcome), found.detected_s)
    assert ["unnoticed"] == outcomes(plan, [(0, 5.0, [])], report, extra=[lost(4, 20.0)])


def test_workers_that_come_or_leave_break_nothing():
    plan, made = "join at step=5; leave rank=2 at step=6", [(0, 5.0, []), (1, 6.0, [2])]
    assert ["endured", "endured"] == outcomes(plan, made, ELASTIC)


KILLED_LATER = {
    # A stop was over before its worker ended for another reason: a second stop, a signal, or something of its own.
    "stop rank=1 at 1s; continue rank=1 at 2s; stop rank=1 at 4s": ["endured", "endured", "replaced"],
    "stop rank=1 at 1s; continue rank=1 at 2s; kill rank=1 at 9s": ["endured", "endured", "replaced"],
    "stop rank=1 at 1s; continue rank=1 at 2s": ["endured", "endured"],
    # The signal takes effect when the worker is continued.
    "stop rank=1 at 1s; segv rank=1 at 2s; continue rank=1 at 8.9s": ["endured", "replaced", "endured"],
    "stop rank=1 at 1s; stop rank=1 at 3s": ["replaced", "replaced"],
    # SIGKILL ends a stopped process, too.
    "stop rank=1 at 1s; kill rank=1 at 9s": ["overtaken", "replaced"],
    # Of a stopped worker, it would take effect only later.
    "stop rank=1 at 1s; segv rank=1 at 2s": ["replaced", "overtaken"],
    # It went on too late to be noticed, and nothing else has ended it.
    "stop rank=1 at 1s; continue rank=1 at 8.9s": ["replaced", "endured"],
}


@pytest.mark.parametrize("plan", KILLED_LATER)
def test_only_what_ended_a_worker_of_an_elastic_run_is_replaced(plan):
    """The worker counts as lost 9 s after the start."""
    moments = [float(fault.rsplit(" ", 1)[1].removesuffix("s")) for fault in plan.split("; ")]
    made = [(index, moment, [1]) for index, moment in enumerate(moments)]
    report = {**DONE, "epochs": [epoch(0.5, 0, 1, 2), epoch(9.1, 0, 2)]}
    assert KILLED_LATER[plan] == outcomes(plan, made, report, extra=[lost(1, 9.05)], end=START + 20)


def test_a_stop_of_several_workers_is_replaced_if_those_that_stay_stopped_are_lost():
    plan, made = "stop role=worker at 1s; continue rank=1 at 2s", [(0, 1.0, [1, 2]), (1, 2.0, [1])]
    found = judged(plan, made, ELASTIC, extra=[lost(2, 6.1)], end=START + 20)
    assert [("replaced", 5.1), ("endured", None)] == [(str(one.outcome), one.detected_s) for one in found]
    assert ["unnoticed", "endured"] == outcomes(
        plan, made, ELASTIC
    )  # worker 2 ended with the run as if it had not been
