"""Which ends of workers the supervisor of an elastic run tolerates, and in whose place it starts others."""

import json
import signal
from dataclasses import replace

import pytest

from ttlaunch import contract
from ttlaunch.app.dialogue import Unattended
from ttlaunch.app.prepare_run import prepare
from ttlaunch.app.run_spec import RunSpec
from ttlaunch.records.coordinator import Heartbeat
from ttlaunch.records.endings import RankError, RankExit
from ttlaunch.records.members import MemberReport
from ttlaunch.records.ranks import Started
from ttlaunch.running.failures.failure import Failure
from ttlaunch.running.logs.output import SilentView
from ttlaunch.running.membership.elastic_run import ElasticRun
from ttlaunch.running.membership.journal import read_journal
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState


class Controller:
    """Notes what the supervisor does with the ranks; real ones are in `tests/running/test_elastic_runs.py`."""

    def __init__(self):
        self.added, self.signals, self.told = [], [], []

    def add(self, ranks):
        for state in ranks:
            state.phase = Phase.WAITING
            self.added.append(state.row.rank)

    def tell(self, number, message):
        self.told.append((number, message))

    def signal_ranks(self, ranks, number, *, marker=None):
        self.signals += [(state.row.rank, number) for state in ranks]

    def rejoined(self):
        return ()


class NotingView(SilentView):
    def __init__(self):
        self.lines = []

    def output(self, stream, line):
        self.lines.append(line.decode())


class Supervised:
    def __init__(self, folder, elastic="1:2"):
        plan = prepare(RunSpec("data_parallel", ranks=2, elastic=elastic), Unattended()).plan
        self.controller, self.folder = Controller(), folder
        self.view = NotingView()
        self.checkpoint = None
        self.run = ElasticRun(
            plan,
            RunFolder("run", folder),
            self.view,
            controller=self.controller,
            newest_checkpoint=lambda: self.checkpoint,
        )
        self.ranks = [RankState(row, Phase.ABSENT if row.later else Phase.RUNNING) for row in plan.ranks]

    def begin(self):
        for what, fields in (("registered", {"applied": 0}), ("answered", {"epoch": 1, "applied": 0})):
            for number in (0, 1):
                report = MemberReport(time=0.0, what=what, incarnation=0, **fields)
                self.run.take([(self.ranks[number], report)])

    def report(self, number, what, **fields):
        self.run.take([(self.ranks[number], MemberReport(time=0.0, what=what, incarnation=0, **fields))])

    def end(self, number, **how):
        state = self.ranks[number]
        state.error = how.pop("error", None)
        state.exit = RankExit(rank=number, **{"status": 1, **how})
        state.phase = Phase.FAILED

    def look(self, lost=(), away=(), *, is_ending=False):
        why = lambda state: "was lost: its shim was killed" if state.row.rank in lost else ""  # noqa: E731
        self.run.notice(self.ranks, why_lost=why, is_ending=is_ending, away=away)


@pytest.fixture
def supervised(tmp_path):
    found = Supervised(tmp_path)
    found.begin()
    return found


def test_the_supervisor_looks_often_while_members_wait_or_have_just_gone_on_and_no_longer(tmp_path):
    supervised = Supervised(tmp_path)
    assert not supervised.run.is_changing
    supervised.begin()
    assert supervised.run.is_changing
    supervised.run.membership.changes[-1].time -= 60  # a first step that takes long
    assert not supervised.run.is_changing
    supervised.run.membership.lose(1, "was killed", 0.0)
    assert supervised.run.is_changing


def test_a_killed_worker_is_tolerated_and_the_next_row_of_its_place_starts_once(supervised):
    supervised.end(1, status=None, signal=9)
    supervised.look()
    supervised.look()
    assert ({1}, [3]) == (supervised.run.tolerated, supervised.controller.added)


def test_a_worker_that_still_starts_when_all_steps_are_made_is_ended_and_did_not_fail(supervised):
    supervised.end(1, status=None, signal=9)
    supervised.look()
    supervised.ranks[3].started = Started(time=0.0, pid=1)
    supervised.report(0, "answered", epoch=2, applied=0)
    supervised.report(0, "progressed", epoch=2, applied=100, is_done=True)
    supervised.look()
    assert ([(3, signal.SIGKILL)], {3}) == (supervised.controller.signals, supervised.run.too_late)


def test_workers_from_other_machines_leave_before_ranks_are_ordered_to_stop(tmp_path):
    supervised = Supervised(tmp_path, elastic="1:3")
    supervised.begin()
    outside = supervised.run.outside.register(None, address=("10.0.0.9", 7000), name="", have_step=0)

    def say(what, **fields):
        beat = Heartbeat(incarnation=outside.incarnation)
        report = MemberReport(time=0.0, what=what, incarnation=outside.incarnation, **fields)
        return supervised.run.outside.heartbeat(outside.number, beat, [report], wait_s=0.0)

    say("registered", applied=0)
    for number in (0, 1):
        supervised.report(number, "answered", epoch=2, applied=0)
    say("answered", epoch=2, applied=0)
    assert (0, 1, outside.number) == supervised.run.membership.state.members
    supervised.look(is_ending=True)
    assert not supervised.run.let_outside_go()
    say("answered", epoch=3, applied=1)
    for number in (0, 1):
        supervised.report(number, "answered", epoch=3, applied=1)
    assert (supervised.run.let_outside_go(), (0, 1)) == (True, supervised.run.membership.state.members)
    assert "the run was ordered to stop" in str(say("progressed", epoch=3, applied=1).messages)


def test_a_worker_without_which_too_few_are_left_is_replaced(tmp_path):
    supervised = Supervised(tmp_path, elastic="2:2")
    supervised.begin()
    supervised.end(1, status=None, signal=9)
    supervised.look()
    assert ({1}, [3], None) == (supervised.run.tolerated, supervised.controller.added, supervised.run.failure)


def test_too_few_workers_before_the_first_step_end_the_run(tmp_path):
    supervised = Supervised(tmp_path, elastic="2:2")
    supervised.end(1)
    supervised.look()
    assert (frozenset(), []) == (supervised.run.tolerated, supervised.controller.added)


def test_a_worker_that_could_not_write_a_checkpoint_ends_the_run(supervised):
    supervised.end(0, error=RankError(type="CheckpointWriteError", message="no space left on device"))
    supervised.look()
    assert frozenset() == supervised.run.tolerated


def test_a_worker_whose_gradient_is_no_number_ends_the_run_and_is_not_replaced_since_all_have_this_gradient(supervised):
    supervised.report(0, "progressed", epoch=1, applied=1)
    supervised.report(1, "progressed", epoch=1, applied=1)
    supervised.end(1, error=RankError(type="NotFiniteError", message="the norm of the gradient is nan"))
    supervised.look()
    assert (frozenset(), [], None) == (supervised.run.tolerated, supervised.controller.added, supervised.run.failure)


def test_a_worker_whose_shim_was_killed_is_tolerated_while_another_one_lives_and_else_names_itself(supervised):
    supervised.look(lost={1})
    assert ({1}, None) == (supervised.run.tolerated, supervised.run.failure)
    supervised.end(3)
    supervised.look(lost={0, 1})
    assert (frozenset(), None) == (supervised.run.tolerated, supervised.run.failure)  # the lost shim is what is named


def test_a_worker_that_the_others_outlived_is_not_the_one_that_ended_the_run(supervised):
    supervised.report(0, "progressed", epoch=1, applied=1)
    supervised.end(1, status=None, signal=9)
    supervised.look()
    supervised.report(0, "answered", epoch=2, applied=1)
    supervised.report(0, "progressed", epoch=2, applied=2)
    supervised.end(0, status=None, signal=11)
    supervised.look()
    assert ({1}, None) == (supervised.run.tolerated, supervised.run.failure)  # worker 0 is what is named


def test_when_the_engine_ends_a_worker_counts_as_failed_until_the_others_go_on_without_it(supervised):
    supervised.report(0, "progressed", epoch=1, applied=1)
    supervised.end(1, status=None, signal=9)
    supervised.look()
    assert {1} == supervised.run.tolerated
    supervised.run.judge_end()
    assert (frozenset(), frozenset()) == (supervised.run.tolerated, supervised.run.lost_before_engine)
    supervised.look()
    supervised.run.note_engine()
    supervised.run.judge_end()
    assert (frozenset(), {1}) == (supervised.run.tolerated, supervised.run.lost_before_engine)
    supervised.look()
    supervised.report(0, "answered", epoch=2, applied=1)
    supervised.look()
    supervised.run.judge_end()
    assert {1} == supervised.run.tolerated


def test_a_worker_that_was_asked_to_leave_is_not_the_one_that_ended_the_run(supervised):
    supervised.report(0, "progressed", epoch=1, applied=1)
    supervised.run.membership.let_leave(1, 0.0)
    supervised.report(0, "answered", epoch=2, applied=1)
    supervised.report(1, "answered", epoch=2, applied=1)
    supervised.report(0, "progressed", epoch=2, applied=2)
    supervised.end(1, status=0)
    supervised.ranks[1].phase = Phase.DONE
    supervised.look()
    supervised.end(0, status=None, signal=11)
    supervised.look()
    assert ({1}, None) == (supervised.run.tolerated, supervised.run.failure)


def test_the_last_workers_of_a_place_that_end_at_once_are_not_replaced_for_ever(supervised):
    supervised.end(1)
    supervised.look()
    for number in (3, 5):
        supervised.end(number)
        supervised.look()
    assert [3, 5] == supervised.controller.added  # worker 1 had not made a step either, so three have ended in a row


@pytest.mark.parametrize("elastic", ["1:2", "2:2"])
def test_a_worker_that_makes_no_progress_is_killed_and_replaced_also_where_too_few_are_left_without_it(
    tmp_path, elastic
):
    supervised = Supervised(tmp_path, elastic)
    supervised.begin()
    supervised.report(0, "progressed", epoch=1, applied=1, limit_s=60.0)
    supervised.report(1, "progressed", epoch=1, applied=1, limit_s=0.0)
    supervised.look()
    supervised.look()
    assert ([(1, 9)], [3]) == (supervised.controller.signals, supervised.controller.added)
    assert ({1}, None) == (supervised.run.tolerated, supervised.run.failure)


def test_a_run_whose_weights_are_gone_says_so_and_does_not_count_those_that_are_left(supervised):
    supervised.report(0, "progressed", epoch=1, applied=1)
    supervised.run.membership.lose(1, "was lost", 0.0)
    supervised.report(0, "answered", epoch=2, applied=None)
    supervised.look()
    failure = supervised.run.failure
    assert "the worker that is left cannot go on: the weights are gone with those that ended" == failure.cause
    assert ("worker-0001 was lost",) == failure.evidence
    assert "the run has saved no checkpoint" in failure.next_step


def test_a_run_whose_weights_are_gone_says_how_to_go_on_from_its_checkpoint(supervised):
    supervised.checkpoint = 12
    supervised.report(0, "progressed", epoch=1, applied=1)
    supervised.run.membership.lose(1, "was lost", 0.0)
    supervised.report(0, "answered", epoch=2, applied=None)
    supervised.look()
    expected = (
        "`ttlaunch run data_parallel --resume run` continues from the checkpoint after step 12, with the same options"
    )
    assert expected == supervised.run.failure.next_step


@pytest.fixture
def stranded(supervised):
    """A worker makes no progress and is killed, and the other one is asked what it has."""
    supervised.report(1, "progressed", epoch=1, applied=1, limit_s=60.0)
    supervised.report(0, "progressed", epoch=1, applied=1, limit_s=0.0)
    supervised.look()
    assert [(0, 9)] == supervised.controller.signals
    return supervised


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_worker_that_made_no_progress_and_took_the_weights_is_named_whether_its_end_is_on_record_or_not(
    stranded, is_recorded
):
    if is_recorded:
        stranded.end(0, status=None, signal=9)
        stranded.look()
    stranded.report(1, "answered", epoch=2, applied=None)
    stranded.look()
    failure = stranded.run.failure
    expected = "rank 0 (worker, localhost) took the weights with it: it was killed because it made no progress for 0 s"
    assert failure.message.startswith(expected)
    assert ("R075", "hung", frozenset()) == (failure.code, failure.kind, stranded.run.tolerated)
    assert "the worker that is left cannot go on: the weights are gone with those that ended" == failure.evidence[0]
    assert "the run has saved no checkpoint" in failure.next_step


def test_of_two_workers_with_the_weights_the_first_that_was_lost_is_named_and_neither_took_them_alone(stranded):
    stranded.end(1, status=None, signal=9)
    stranded.look()
    failure = stranded.run.failure
    assert (0, True) == (failure.rank, failure.cause.startswith("was killed because it made no progress for 0 s"))
    assert "0 workers are left, and a step needs 1" == failure.evidence[0]


def test_a_worker_that_made_no_progress_is_not_named_where_another_one_was_lost_before_it(supervised):
    supervised.report(0, "progressed", epoch=1, applied=1, limit_s=0.0)
    supervised.end(1, status=None, signal=9)
    supervised.look()
    supervised.look()
    supervised.end(0, status=None, signal=9)
    supervised.look()
    assert (None, {0}) == (supervised.run.failure, supervised.run.tolerated)


def test_a_run_that_has_too_few_workers_and_starts_none_only_waits_for_others(tmp_path):
    supervised = Supervised(tmp_path, elastic="2:2")
    supervised.begin()
    supervised.report(0, "progressed", epoch=1, applied=1)
    assert not supervised.run.waits_for_workers(supervised.ranks)
    supervised.look(lost={1, 3}, away={"box"})
    supervised.report(0, "answered", epoch=2, applied=1)
    supervised.look(lost={1, 3}, away={"box"})
    assert ([], None, True) == (
        supervised.controller.added,
        supervised.run.failure,
        supervised.run.waits_for_workers(supervised.ranks),
    )
    supervised.ranks[3].phase = Phase.STARTING
    assert not supervised.run.waits_for_workers(supervised.ranks)  # one that does not start may hang


def test_workers_that_wait_for_others_save_what_they_have_when_the_run_is_to_stop(tmp_path):
    supervised = Supervised(tmp_path, elastic="2:2")
    supervised.begin()
    supervised.report(0, "progressed", epoch=1, applied=1)
    supervised.run.end_waiting(supervised.ranks)
    supervised.look(lost={1, 3}, away={"box"})
    supervised.report(0, "answered", epoch=2, applied=1)
    save = [told for told in supervised.controller.told if told[1] == contract.ORDER_TO_SAVE]
    assert ([], False) == (save, supervised.run.has_saved)
    supervised.run.end_waiting(supervised.ranks)
    save = [told for told in supervised.controller.told if told[1] == contract.ORDER_TO_SAVE]
    assert ([(0, contract.ORDER_TO_SAVE)], True) == (save, supervised.run.has_saved)


def test_a_run_that_has_too_few_workers_ends_where_nobody_can_join_any_more(tmp_path):
    supervised = Supervised(tmp_path, elastic="2:2")
    supervised.begin()
    supervised.report(0, "progressed", epoch=1, applied=1)
    supervised.run.waits_for_others = True
    (tmp_path / "members.jsonl").unlink()
    (tmp_path / "members.jsonl").mkdir()  # the journal cannot be written any more
    supervised.end(1, status=None, signal=9)
    supervised.look()
    assert ([], frozenset()) == (supervised.controller.added, supervised.run.tolerated)  # so worker 1 is what is named


def test_a_journal_that_cannot_be_written_is_said_once(supervised):
    (supervised.folder / "members.jsonl").unlink()
    (supervised.folder / "members.jsonl").mkdir()
    supervised.report(1, "progressed", epoch=1, applied=1)
    supervised.look()
    supervised.look()
    warning = "members.jsonl cannot be written: is a directory; nobody joins this run any more"
    assert [warning] == supervised.view.lines


def test_who_is_to_blame_for_a_hang_is_replaced_where_others_have_the_weights(supervised):
    hang = Failure(code="R014", rank=1, cause="has not moved for 31 s", time=0.0)
    why_lost = lambda _: ""  # noqa: E731
    nobody = replace(hang, rank=None)
    assert not supervised.run.outlives(nobody, supervised.ranks, why_lost=why_lost)
    assert supervised.run.outlives(hang, supervised.ranks, why_lost=why_lost)
    assert supervised.run.outlives(hang, supervised.ranks, why_lost=why_lost)  # its process has not ended yet
    assert ([(1, 9)], [3]) == (supervised.controller.signals, supervised.controller.added)
    supervised.look()
    assert ({1}, None) == (supervised.run.tolerated, supervised.run.failure)
    last = replace(hang, rank=0)
    assert not supervised.run.outlives(last, supervised.ranks, why_lost=why_lost)


def ends_in_journal(supervised, ends):
    """End both workers while the run is being ended; return what the journal has of it."""
    supervised.look(is_ending=True)
    for number, how in enumerate(ends):
        supervised.end(number, **how)
        supervised.look(is_ending=True)
    return [(entry["what"], entry.get("worker")) for entry in read_journal(supervised.folder)][3:]


def test_workers_that_end_because_the_run_was_ordered_to_stop_are_not_lost(supervised):
    ended = [("ended", 0), ("ended", 1), ("stopped", None)]
    assert ended == ends_in_journal(supervised, [{"status": 0}, {"status": 0}])
    assert {0: "ended with the run", 1: "ended with the run"} == supervised.run.membership.left


def test_a_worker_that_is_killed_while_the_run_is_being_ended_is_lost(supervised):
    ended = [("ended", 0), ("lost", 1), ("stranded", None)]
    assert ended == ends_in_journal(supervised, [{"status": 0}, {"status": None, "signal": 9}])


def test_who_is_awaited_is_said_and_is_an_event_of_the_run_so_that_programs_see_it(tmp_path, monkeypatch):
    monkeypatch.setattr("ttlaunch.running.membership.elastic_run._REMINDER_S", 0.0)
    supervised = Supervised(tmp_path, elastic="2:2")
    supervised.report(0, "registered", applied=0)
    supervised.look()
    assert ["waiting for 1 worker more of 2; ready: worker-0000"] == supervised.view.lines
    [event] = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert ("workers_awaited", 1, 2, ["worker-0000"]) == (event["event"], event["missing"], event["of"], event["ready"])
