"""The coordinator at work: what it writes into the journal before it orders anything, who counts as hung, what a change costs."""

import json

import pytest

from ttlaunch.membership.coordinator_state import Phase
from ttlaunch.membership.messages import Begin, Dismiss, Finish, Prepare, order_from_json
from ttlaunch.planning.launch_plan import ElasticLimits
from ttlaunch.records.members import MemberReport
from ttlaunch.running.membership.journal import Journal, epochs_so_far, read_journal
from ttlaunch.running.membership.members import NotAdmittedError
from ttlaunch.running.membership.membership import Membership
from ttlaunch.running.runs.run_folder import RunFolder


class World:
    """A membership, what it has ordered, and reports of workers as they come from their records."""

    def __init__(self, folder, *, first=3, minimum=1, maximum=3, servers=0, **rest):
        self.folder = RunFolder("run", folder)
        self.journal = Journal(self.folder)
        self.orders = []  # with the length of the journal when each was given
        limits = ElasticLimits(minimum, maximum, micro_batches=8, first=first, servers=servers)
        self.members = Membership(limits, self.journal, tell=self.note, **rest)

    def note(self, member, message):
        order = order_from_json(message)
        assert order.to == (member,)
        self.orders.append((order, len(read_journal(self.folder.path))))

    def given(self, kind):
        return [order.to[0].number for order, _ in self.orders if isinstance(order.message, kind)]

    def report(self, number, what, now=0.0, **fields):
        self.members.take([(number, MemberReport(time=0.0, what=what, incarnation=0, **fields))], now)

    def answer_all(self, now=0.0, **fields):
        for number in self.members.state.members:
            self.report(number, "answered", now, epoch=self.members.state.epoch, **{"applied": 0, **fields})

    def begin(self, now=0.0):
        for number in range(3):
            self.report(number, "registered", now, applied=0)
        self.answer_all(now)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_what_the_journal_tells_of_epochs_while_the_run_lasts_is_what_its_report_tells_of_them_afterwards(world):
    world.begin(now=0.0)
    world.report(0, "progressed", now=9.0, epoch=1, applied=4)
    world.members.lose(1, "was killed by SIGKILL", now=10.0)
    world.answer_all(now=10.1, applied=4)
    world.report(0, "progressed", now=10.5, epoch=2, applied=5)
    with (world.folder.path / "members.jsonl").open("a") as file:
        file.write(
            '{"what": "epoch", "epoch": "three"}\n{"what": "resumed", "epoch": 2, "pause_s": "long"}\n[1]\n{"what"'
        )
    found = epochs_so_far(world.folder.path)
    reported = [change.as_json() for change in world.members.changes]
    assert [9.0, 0.5] == [one["pause_s"] for one in reported]
    names = ("epoch", "members", "step", "reasons", "computed_anew", "lost_steps")
    assert [{name: one[name] for name in names} for one in reported] == [
        {name: one[name] for name in names} for one in found
    ]
    assert [one["pause_s"] for one in reported] == [one.get("pause_s") for one in found]


def test_an_epoch_begins_when_all_that_start_with_the_run_are_ready_and_is_in_the_journal_before_it_is_ordered(world):
    world.report(0, "registered", applied=0)
    world.report(1, "registered", applied=0)
    assert (Phase.WAITING, []) == (world.members.phase, world.orders)
    world.report(2, "registered", applied=0)
    world.answer_all()
    assert ([0, 1, 2], [0, 1, 2]) == (world.given(Prepare), world.given(Begin))
    lines = read_journal(world.folder.path)
    assert ["registered"] * 3 + ["epoch"] == [line["what"] for line in lines]
    assert ([0, 1, 2], 0) == (lines[-1]["members"], lines[-1]["step"])
    assert {len(lines)} == {seen for order, seen in world.orders if isinstance(order.message, Begin)}


def test_steps_that_only_a_lost_worker_had_made_are_counted_with_the_change(world):
    world.begin()
    world.report(1, "progressed", epoch=1, applied=7, own_steps=3)
    world.report(2, "progressed", epoch=1, applied=6, own_steps=2)
    world.members.lose(1, "was killed by SIGKILL", now=1.0)
    world.answer_all(applied=7)
    assert [0, 3] == [change.lost_steps for change in world.members.changes]
    assert [0, 3] == [entry["lost_steps"] for entry in read_journal(world.folder.path) if entry["what"] == "epoch"]


def test_a_member_that_is_cut_off_begins_an_epoch_of_the_same_members_but_not_again_and_again(world):
    """Workers of other machines take part, too: one that lies could keep the run from making steps."""
    world.begin(now=0.0)
    world.report(1, "cut off", now=2.0, epoch=1, applied=0)
    assert [(0, 1, 2)] == [change.members for change in world.members.changes]
    world.report(1, "cut off", now=5.0, epoch=1, applied=0)
    world.answer_all(now=5.1)
    assert [(0, 1, 2), (0, 1, 2)] == [change.members for change in world.members.changes]
    assert ("worker-0001 lost its connection to another worker",) == world.members.changes[-1].reasons
    world.report(1, "cut off", now=5.2, epoch=2, applied=0)
    world.report(1, "cut off", now=9.9, epoch=1, applied=0)
    assert 2 == world.members.state.epoch


def test_a_lost_worker_begins_an_epoch_without_it_whose_reason_and_cost_are_known(world):
    world.begin(now=0.0)
    world.report(0, "progressed", now=9.0, epoch=1, applied=4)
    world.members.lose(1, "was killed by SIGKILL", now=10.0)
    world.answer_all(now=10.1, applied=4, held=((0, 4),))
    change = world.members.changes[-1]
    assert ((0, 2), 4, ("worker-0001 was killed by SIGKILL",)) == (change.members, change.step, change.reasons)
    assert 4 == change.computed_anew  # of the step's 8 micro-batches, both members together had one node of four
    assert change.pause_s is None
    world.report(0, "progressed", now=10.5, epoch=change.epoch, applied=5)
    assert 0.5 == change.pause_s
    assert "resumed" == read_journal(world.folder.path)[-1]["what"]


def test_a_worker_that_follows_disturbs_nobody_until_it_is_ready_and_the_journal_says_what_it_was_given(tmp_path):
    world = World(tmp_path, maximum=4)
    world.begin(now=0.0)
    world.report(3, "registered", now=1.0, follows=True)
    for number in range(3):
        world.report(number, "progressed", now=9.0, epoch=1, applied=4)
    world.report(3, "registered", now=10.0, applied=4, follows=True)
    world.answer_all(now=10.1, applied=4)
    change = world.members.changes[-1]
    assert ((0, 1, 2, 3), ("worker-0003 joined",)) == (change.members, change.reasons)
    taken = {"given": ((0, 40), (1, 40), (2, 40)), "taken": (1, 3)}
    world.report(3, "progressed", now=10.5, epoch=change.epoch, applied=5, **taken)
    assert 0.5 == change.pause_s
    [given] = [entry for entry in read_journal(world.folder.path) if entry["what"] == "given"]
    assert (3, {"0": 40, "1": 40, "2": 40}, 1, 3) == tuple(
        given[name] for name in ("worker", "bytes", "states", "means")
    )


def test_a_worker_that_is_asked_to_leave_is_dismissed_and_the_others_go_on(world):
    world.begin()
    world.members.let_leave(2, now=1.0)
    world.answer_all(applied=1)
    assert ([2], "left") == (world.given(Dismiss), world.members.left[2])
    assert (0, 1) == world.members.changes[-1].members


def test_a_worker_without_which_too_few_are_left_cannot_leave_and_nothing_is_interrupted(tmp_path):
    world = World(tmp_path, minimum=2)
    world.begin()
    world.members.let_leave(2, now=1.0)
    world.members.let_leave(2, now=1.1)  # it leaves already
    with pytest.raises(
        NotAdmittedError, match="worker-0001 cannot leave: a step needs 2 workers, and without it 1 is left"
    ):
        world.members.let_leave(1, now=1.2)
    world.answer_all(applied=1)
    assert ((0, 1), Phase.RUNNING) == (world.members.changes[-1].members, world.members.phase)


def test_a_worker_that_leaves_does_not_count_among_those_that_are_there(tmp_path):
    world = World(tmp_path, minimum=2)
    world.begin()
    world.members.let_leave(2, now=1.0)
    world.members.lose(1, "was killed by SIGKILL", now=1.1)
    assert 1 == world.members.state.missing


def test_the_server_that_alone_has_the_weights_cannot_leave(tmp_path):
    world = World(tmp_path, servers=1)
    world.begin()
    with pytest.raises(NotAdmittedError, match="worker-0000 cannot leave: it is the server"):
        world.members.let_leave(0, now=1.0)
    world.members.let_leave(1, now=1.0)


def test_a_member_without_progress_counts_as_hung_and_one_that_waits_for_it_does_not(tmp_path):
    world = World(tmp_path, hang_s=2.0)
    world.begin(now=0.0)
    for now in (1.0, 2.0, 2.9):
        world.report(0, "progressed", now, epoch=1, applied=0, counts=(5,), waits=True)
        world.report(1, "progressed", now, epoch=1, applied=0, counts=(int(now * 10),))
        world.report(2, "progressed", now, epoch=1, applied=0, counts=(5,))  # its heart beats, and its step hangs
    assert [] == list(world.members.late(2.9))
    assert [2] == list(world.members.late(3.1))


def test_who_does_not_answer_counts_as_hung_too(tmp_path):
    world = World(tmp_path, hang_s=2.0)
    world.begin(now=0.0)
    world.members.lose(1, "was killed by SIGKILL", now=10.0)
    world.report(0, "answered", 10.1, epoch=2, applied=0)
    world.report(0, "progressed", 12.1, epoch=2, applied=0, waits=True)
    assert [2] == list(world.members.late(12.5))


def test_all_are_told_to_end_when_every_member_has_made_the_last_step(world):
    world.begin()
    for number in range(3):
        assert [] == world.given(Finish)
        world.report(number, "progressed", epoch=1, applied=20, is_done=True)
    assert ([0, 1, 2], Phase.FINISHED) == (world.given(Finish), world.members.phase)


def test_a_journal_that_cannot_be_written_keeps_others_from_joining_and_the_members_go_on(tmp_path):
    world = World(tmp_path)
    world.begin()
    (tmp_path / "members.jsonl").unlink()
    (tmp_path / "members.jsonl").mkdir()
    world.members.lose(1, "was killed by SIGKILL", now=1.0)
    world.answer_all(applied=1)
    assert ((0, 2), True) == (world.members.changes[-1].members, world.members.is_frozen)
    world.report(7, "registered", applied=None)
    assert 7 not in world.members.state.workers


def test_orders_are_repeated_until_they_are_obeyed(world):
    for number in range(3):
        world.report(number, "registered", applied=0)
    world.orders.clear()
    for now in (1.0, 1.1, 2.0):
        world.members.tick(now)
    assert [0, 1, 2] * 2 == world.given(Prepare)


def test_a_report_that_is_no_event_or_of_an_unknown_worker_changes_nothing(world):
    before = world.members.state
    world.report(0, "answered", epoch=7)
    world.report(5, "progressed", epoch=7, applied=None)
    world.report(1, "dances")
    assert before == world.members.state


def test_lines_of_the_journal_are_json_and_a_torn_one_is_passed_over(world):
    world.begin()
    path = world.folder.path / "members.jsonl"
    whole = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(path.read_text() + '{"what": "ep')
    assert whole == read_journal(world.folder.path)


def test_what_has_come_since_the_last_look_leads_to_what_it_leads_to_one_by_one(tmp_path):
    def report(number, what, incarnation=0, **fields):
        return number, MemberReport(time=0.0, what=what, incarnation=incarnation, **fields)

    ready = [report(number, "registered", applied=0) for number in range(3)]
    answers = [report(number, "answered", epoch=1, applied=0) for number in (0, 1, 1, 2)]
    steps = [report(number, "progressed", epoch=1, applied=1) for number in range(3)]
    again = [report(1, "registered", incarnation=1, applied=1), report(1, "progressed", epoch=1, applied=2)]
    (tmp_path / "one").mkdir(), (tmp_path / "all").mkdir()
    one_by_one, at_once = World(tmp_path / "one"), World(tmp_path / "all")
    for one in [*ready, *answers, *steps, *again]:
        one_by_one.members.take([one], 1.0)
    at_once.members.take([*ready, *answers, *steps, *again], 1.0)
    assert 2 == at_once.members.state.epoch
    assert one_by_one.members.state == at_once.members.state
    assert one_by_one.orders == at_once.orders
    whats = [[entry["what"] for entry in read_journal(world.folder.path)] for world in (one_by_one, at_once)]
    assert whats[0] == whats[1]
