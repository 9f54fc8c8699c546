"""Workers that join by themselves: numbers, incarnations, and orders that wait for a heartbeat."""

import threading
import time
from random import Random

import pytest

from ttlaunch import contract
from ttlaunch.planning.launch_plan import ElasticLimits, RankRow
from ttlaunch.records.coordinator import Heartbeat
from ttlaunch.records.members import MemberReport
from ttlaunch.records.ranks import read_progress
from ttlaunch.running.membership.journal import Journal
from ttlaunch.running.membership.members import ENDED, NotAdmittedError, Order
from ttlaunch.running.membership.membership import Membership
from ttlaunch.running.membership.outside import OutsideWorkers
from ttlaunch.running.runs.facts import RunFacts, with_joined
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState, Watch

ADDRESS = ("10.0.0.9", 7000)


class Joining:
    """A run of one own worker, number 0, and 17 rows; and workers that join it."""

    def __init__(self, folder):
        journal = Journal(RunFolder("run", folder))
        limits = ElasticLimits(1, 4, micro_batches=8, first=1)
        (folder / contract.RECORDS_DIR).mkdir()
        self.members = Membership(limits, journal, tell=self.tell)
        run = RunFolder("run", folder)
        self.outside = OutsideWorkers(self.members, journal, planned=17, ranks=lambda: (), folder=run)
        self.folder = folder

    def tell(self, member, message):
        if member.number >= 17:
            self.outside.pass_on(member, message)

    def own(self, what, **fields):
        self.members.take([(0, MemberReport(time=0.0, what=what, incarnation=0, **fields))], 0.0)

    def begin(self):
        self.own("registered", applied=0)
        self.own("answered", epoch=1, applied=0)

    def join(self, number=None):
        return self.outside.register(number, address=ADDRESS, name="", have_step=0)

    def beat(self, admitted, *records, wait_s=0.0):
        reports = [MemberReport(time=0.0, incarnation=admitted.incarnation, **one) for one in records]
        beat = Heartbeat(incarnation=admitted.incarnation)
        return self.outside.heartbeat(admitted.number, beat, reports, wait_s=wait_s)


@pytest.fixture
def run(tmp_path):
    joining = Joining(tmp_path)
    joining.begin()
    return joining


def test_numbers_follow_the_rows_of_the_plan_and_a_worker_that_comes_again_has_its_number_and_a_new_incarnation(run):
    first, second = run.join(), run.join()
    assert [(17, 1), (18, 1)] == [(one.number, one.incarnation) for one in (first, second)]
    again = run.join(17)
    assert (17, 2) == (again.number, again.incarnation)
    assert Order.FENCED != run.beat(again).order


def test_a_worker_that_comes_again_starts_anew_and_is_lost_at_once_if_it_ends_again(run):
    first = run.join()
    run.beat(first, {"what": "registered", "applied": None})
    run.own("answered", epoch=2, applied=3)
    run.beat(first, {"what": "answered", "epoch": 2, "applied": None})
    again = run.join(17)
    assert ["starting"] == [one.state for one in run.outside.workers()]
    assert Order.FENCED == run.beat(first).order
    run.beat(again, {"what": "registered", "applied": None})
    assert 17 in run.members.state.workers
    ended = Heartbeat(incarnation=again.incarnation, phase=ENDED)
    run.outside.heartbeat(17, ended, [], wait_s=0.0)
    assert 17 not in run.members.state.workers
    assert ["gone"] == [one.state for one in run.outside.workers()]


def test_a_worker_takes_part_once_it_is_ready_and_all_have_answered(run):
    admitted = run.join()
    answer = run.beat(admitted, {"what": "registered", "applied": None, "host": "far", "address": "10.0.0.9:7000"})
    assert (Order.PREPARE, ["prepare"]) == (answer.order, [one["kind"] for one in answer.messages])
    run.own("answered", epoch=2, applied=3)
    answer = run.beat(admitted, {"what": "answered", "epoch": 2, "applied": None})
    [begin] = answer.messages
    assert ("begin", [0, 17]) == (begin["kind"], [seat["member"]["number"] for seat in begin["seats"]])
    assert [[17, None]] == [list(pair) for pair in begin["behind"]]
    assert [1] == [one.rank for one in run.outside.ready()]


@pytest.mark.parametrize("seed", range(200))
def test_eight_workers_have_the_ranks_of_their_numbers_in_whatever_order_they_come(tmp_path, seed):
    order, random = list(range(8)), Random(seed)  # noqa: S311 - no secret
    random.shuffle(order)
    journal = Journal(RunFolder("run", tmp_path))
    rows = [RankState(RankRow(number, f"host{number}", 0, "worker"), Phase.RUNNING) for number in range(8)]
    members = Membership(ElasticLimits(1, 8, micro_batches=8, first=8), journal, tell=lambda *_: None)
    folder = RunFolder("run", tmp_path)
    outside = OutsideWorkers(members, journal, planned=8, ranks=lambda: rows, folder=folder)
    for what, fields in (("registered", {"applied": 0}), ("answered", {"epoch": 1, "applied": 0})):
        for number in order:
            address = {"address": f"10.0.0.{number}:7000"} if what == "registered" else {}
            members.take([(number, MemberReport(time=0.0, what=what, incarnation=0, **fields, **address))], 0.0)
    expected = [(number, number, f"10.0.0.{number}", 7000) for number in range(8)]
    assert expected == [(one.rank, one.number, one.ip_address, one.port) for one in outside.ready()]


def test_what_a_worker_reports_is_the_same_in_views_metrics_and_the_report(run):
    admitted, sent = run.join(), time.time() + 1000  # its clock is ahead
    lines = [
        contract.record_line({"kind": kind, "time": sent + number, **values}).strip()
        for number, (kind, values) in enumerate(
            [
                ("ready", {"total_steps": 9}),
                ("step", {"step": 1, "loss": 5.0, "tokens": 400, "own_tokens": 100}),
                ("step", {"step": 2, "loss": 4.5, "own_tokens": 100}),
                ("usage", {"cpu_percent": 80, "memory_bytes": 5000, "count": 1}),
                ("parameters", {"digests": {"w": "0" * 64}}),
            ]
        )
    ]
    beat = Heartbeat(incarnation=1, step=7, loss=0.1, records=tuple(lines))
    run.outside.heartbeat(17, beat, [read_progress(line.encode()) for line in lines], wait_s=0.0)
    [shown] = run.outside.workers()
    assert (2, 4.5, 100.0, 5000) == (shown.step, shown.loss, shown.tokens_per_s, shown.memory_bytes)
    [summary] = run.outside.summaries()
    assert (17, "10.0.0.9", 2, 100.0, 5000) == tuple(
        summary[name] for name in ("rank", "host", "step", "tokens_per_s", "memory_bytes")
    )
    rows = tuple(RankRow(number, "here", 0, "worker", later=number > 0) for number in range(17))
    facts = with_joined(RunFacts("x", "local", rows, is_recipe=True), run.folder)
    watch = Watch(facts, RunFolder("run", run.folder))
    kinds = [type(record).__name__ for state, record in watch.records() if state.row.rank == admitted.number]
    assert ["Ready", "StepDone", "StepDone", "Usage"] == kinds
    state = watch.ranks[17]
    assert (2, 4.5, 100.0, 5000) == (state.step, state.loss, state.own_per_s("tokens"), state.usage.memory_bytes)
    assert abs(state.last_step_time - time.time()) < 500, "its clock was corrected"


def test_a_member_that_differentiates_nothing_has_the_speed_of_nothing(run):
    """Such as a server at rank 0, which reports the tokens of the whole step."""
    run.join()
    lines = [
        contract.record_line({"kind": "step", "time": time.time() + step, "step": step, **counted}).strip()
        for step, counted in ((1, {"tokens": 400, "own_tokens": 0}), (2, {"tokens": 400, "own_tokens": 0}))
    ]
    beat = Heartbeat(incarnation=1, step=2, records=tuple(lines))
    run.outside.heartbeat(17, beat, [read_progress(line.encode()) for line in lines], wait_s=0.0)
    assert [0.0] == [one.tokens_per_s for one in run.outside.workers() if one.number == 17]


def test_records_of_all_workers_together_are_bounded(run):
    run.outside._left_bytes = 500
    run.join()
    line = contract.record_line({"kind": "note", "time": 1.0, "text": "x" * 300}).strip()
    for _ in range(3):
        beat = Heartbeat(incarnation=1, records=(line,))
        run.outside.heartbeat(17, beat, [read_progress(line.encode())], wait_s=0.0)
    assert 1 == len((run.folder / contract.progress_file(17)).read_text().splitlines())


def test_a_heartbeat_waits_for_an_order(run):
    admitted = run.join()
    run.beat(admitted, {"what": "registered", "applied": None})
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(run.beat(admitted, wait_s=20.0)))
    waiting.start()
    run.own("answered", epoch=2, applied=3)
    run.members.take([(17, MemberReport(time=0.0, what="answered", incarnation=1, epoch=2))], 0.0)
    waiting.join(20.0)
    assert ["begin"] == [one["kind"] for one in answers[0].messages]


def test_the_older_process_of_a_worker_is_fenced_as_soon_as_a_newer_one_registers(run):
    admitted = run.join()
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(run.beat(admitted, wait_s=20.0)))
    waiting.start()
    run.join(admitted.number)
    waiting.join(20.0)
    assert Order.FENCED == answers[0].order


@pytest.mark.parametrize(
    ("number", "why"),
    [(3, "the run starts the worker of this number itself"), (40, "no worker has had this number")],
)
def test_a_number_that_is_not_of_a_worker_that_joined_is_refused(run, number, why):
    with pytest.raises(NotAdmittedError, match=why):
        run.join(number)


def test_nobody_joins_a_run_that_is_ending_or_whose_journal_cannot_be_written(run):
    (run.folder / "members.jsonl").unlink()
    (run.folder / "members.jsonl").mkdir()
    run.members.lose(40, "was never there", 0.0)
    with pytest.raises(NotAdmittedError, match="journal"):
        run.join()
    run.outside.close()
    with pytest.raises(NotAdmittedError, match="ending"):
        run.join()


def test_a_worker_leaves_after_the_present_step(run):
    admitted = run.join()
    with pytest.raises(KeyError):
        run.outside.leave(admitted.number + 1)
    with pytest.raises(NotAdmittedError, match="worker-0017 does not take part: it is still starting"):
        run.outside.leave(admitted.number)
    run.beat(admitted, {"what": "registered", "applied": None})
    run.own("answered", epoch=2, applied=3)
    run.beat(admitted, {"what": "answered", "epoch": 2, "applied": 3})
    assert 4 == run.outside.leave(admitted.number)
    run.own("answered", epoch=3, applied=4)
    answer = run.beat(admitted, {"what": "answered", "epoch": 3, "applied": 4})
    assert Order.LEAVE == answer.order
    assert ["worker-0017"] == [f"worker-{one.number:04d}" for one in run.outside.workers() if one.left]
    with pytest.raises(NotAdmittedError, match="worker-0017 does not take part: it has left"):
        run.outside.leave(admitted.number)


def test_a_worker_whose_process_has_ended_is_lost_at_once(run):
    joined = run.join()
    run.beat(joined, {"what": "registered"})
    assert joined.number in run.members.state.workers
    run.outside.heartbeat(joined.number, Heartbeat(incarnation=1, phase=ENDED), [], wait_s=0.0)
    assert joined.number not in run.members.state.workers
    assert run.members.left[joined.number] == "has ended"


def test_a_worker_is_reached_where_it_has_registered_whatever_its_rank_says(run):
    joined = run.join()
    run.beat(joined, {"what": "registered", "host": "localhost", "address": "10.0.0.1:1"})
    seat = run.members.state.workers[joined.number].seat
    assert (seat.host, seat.address) == ("worker-0017 at 10.0.0.9", "10.0.0.9:7000")


def test_a_report_of_another_incarnation_than_that_of_the_connection_changes_nothing(run):
    joined = run.join()
    report = MemberReport(time=0.0, what="registered", incarnation=9)
    run.outside.heartbeat(joined.number, Heartbeat(incarnation=1), [report], wait_s=0.0)
    assert joined.number not in run.members.state.workers
