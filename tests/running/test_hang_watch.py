"""How long nothing may move before a run counts as hanging, on a clock of our own."""

from types import SimpleNamespace

import pytest

from ttlaunch import contract
from ttlaunch.flight_recorder import BEGUN_COLLECTIVE, COLLECTIVE, DATA_PARALLEL_START, DONE, GROUP, read_recorder
from ttlaunch.flight_recorder_writer import FlightRecorder
from ttlaunch.planning.launch_plan import CommandProgram, RankRow, RecipeProgram
from ttlaunch.records.agents import RankProcess, StoppedHelper
from ttlaunch.records.endings import ErrorInFlight
from ttlaunch.running import flight_recorders
from ttlaunch.running.hang.hangs import HangWatch
from ttlaunch.running.rank_controller import ProcessSnapshot
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Phase, RankState

SECOND = 10**9


class RankController:
    """Ranks that are well and answer at once, or as `late` says after so many questions."""

    answers_at_once = True

    def __init__(self, folder):
        self.recordings = self.folder = folder
        self.stopped, self.faults, self.helpers = frozenset(), {}, ()
        self.signals, self.looks, self.dumped = [], [], []
        self.late = 0
        self.processes, self.asked = {}, []

    def snapshot(self, ranks, *, since, closely=False):
        self.looks.append(since)
        if len(self.looks) <= self.late:
            return None
        return ProcessSnapshot(self.stopped, self.faults, self.helpers, self.processes)

    def signal_ranks(self, ranks, number, *, marker=None):
        self.signals.append(number)
        self.asked += [state.row.rank for state in ranks]
        for state in ranks:
            path = self.folder / contract.stacks_file(state.row.rank)
            path.parent.mkdir(exist_ok=True)
            path.write_text("Thread 0x1 (most recent call first):\n")

    def dump_stacks(self, ranks):
        self.dumped += [state.row.rank for state in ranks]


ENGINE = SimpleNamespace(names=SimpleNamespace(launcher="mpirun"))


class PythonProgram(CommandProgram):
    is_python = True


class Run:
    """Two ranks with flight recorders, and a clock that moves when it is told to."""

    def __init__(self, folder, *, timeout_s=None, program=RecipeProgram):
        self.now = 1000.0
        self.controller = RankController(folder)
        self.ranks = [RankState(RankRow(rank, "box", rank, "peer"), Phase.RUNNING) for rank in (0, 1)]
        self.boxes = [FlightRecorder(folder / contract.recorder_file(rank), rank=rank) for rank in (0, 1)]
        plan = SimpleNamespace(program=object.__new__(program), world_size=2, engine=ENGINE)
        self.watch = HangWatch(
            plan, RunFolder("run", folder), self.controller, timeout_s=timeout_s, clock=lambda: self.now
        )

    def rest(self, seconds, *, tick=0.5):
        """The failure that is told while nothing moves for so long, and when; else None."""
        for count in range(round(seconds / tick)):
            self.now += tick
            failure = self.watch.check(self.ranks)
            if failure is not None:
                return failure, (count + 1) * tick
        return None

    def steps(self, count, *, seconds):
        for step in range(1, count + 1):
            self.boxes[0].begin_step(step)
            self.boxes[0].end_step(int(seconds * SECOND))
        assert self.rest(0.5) is None


@pytest.fixture
def run(tmp_path):
    """`run(…)`: a run of two ranks that are at work."""

    def make(**options):
        return Run(tmp_path, **options)

    return make


def told_after(run, *, least, most):
    failure, seconds = run.rest(most + 1)
    assert least <= seconds <= most, seconds
    return failure


def test_until_ten_steps_have_been_timed_it_takes_two_minutes(run):
    one = run()
    one.steps(9, seconds=0.1)
    told_after(one, least=120, most=124)


def test_after_ten_steps_it_takes_half_a_minute_where_steps_are_short(run):
    one = run()
    one.steps(10, seconds=0.1)
    told_after(one, least=30, most=34)


def test_after_ten_steps_it_takes_ten_of_the_slowest(run):
    one = run()
    one.steps(9, seconds=1.0)
    one.boxes[1].begin_step(1)
    one.boxes[1].end_step(20 * SECOND)
    one.steps(1, seconds=1.0)
    assert one.rest(199) is None
    told_after(one, least=1, most=5)


def test_a_timeout_that_is_named_holds_from_the_start(run):
    one = run(timeout_s=7.0)
    one.steps(50, seconds=20.0)
    told_after(one, least=7, most=11)


def test_every_counter_of_every_rank_is_a_sign_of_life(run):
    one = run(timeout_s=7.0)
    box = one.boxes[1]
    for move in (box.passed, lambda: box.end_step(1), lambda: box.announce("x"), lambda: box.announce("")):
        assert one.rest(6) is None
        move()
    at = box.begin(1, ("a", None), None, peer=0, tag=0, size=8, now=10)
    assert one.rest(6) is None
    box.end(at, 20)
    assert one.rest(6) is None
    one.ranks[0].phase = Phase.DONE
    assert one.rest(6) is None
    told_after(one, least=1, most=5)


def test_what_is_announced_may_take_half_an_hour(run):
    one = run()
    one.steps(10, seconds=0.1)
    with one.boxes[0].announced("evaluation"):
        assert one.rest(1790, tick=1.0) is None
        told_after(one, least=5, most=20)


def test_what_is_announced_is_over_when_its_block_is(run):
    one = run()
    one.steps(10, seconds=0.1)
    with one.boxes[0].announced("evaluation"):
        assert one.rest(100) is None
    told_after(one, least=30, most=34)


def test_an_announced_rank_that_waits_for_another_one_does_not_excuse_it(run):
    one = run(timeout_s=7.0)
    one.boxes[0].announce("evaluation")
    one.boxes[0].begin(2, ("a", None), None, peer=1, tag=0, size=8, now=10)
    failure = told_after(one, least=7, most=11)
    assert (failure.code, failure.rank) == ("R014", 1)


def test_a_launcher_that_slept_takes_none_of_its_sleep_for_a_hang(run):
    one = run(timeout_s=7.0)
    assert one.rest(5) is None
    one.now += 3600
    assert one.watch.check(one.ranks) is None
    assert one.rest(1) is None


def test_what_has_come_with_the_hosts_answer_is_read_before_anything_is_judged(run):
    one = run(timeout_s=7.0)
    one.controller.answers_at_once, one.controller.late = False, 3
    assert one.rest(8.5) is None
    one.boxes[0].passed()
    assert one.rest(6) is None
    assert one.controller.signals == []
    told_after(one, least=1, most=6)


def test_a_host_that_never_answers_delays_the_verdict_and_no_more(run):
    one = run(timeout_s=7.0)
    one.controller.answers_at_once, one.controller.late = False, 10**6
    told_after(one, least=16, most=22)


def test_a_stopped_rank_is_looked_into_from_outside(run):
    one = run(timeout_s=7.0)
    one.controller.stopped = frozenset({1})
    one.controller.signal_ranks = lambda ranks, number, marker=None: None
    failure = told_after(one, least=7, most=13)
    assert (failure.code, failure.rank) == ("R013", 1)
    assert one.controller.dumped == [0, 1]


def test_ranks_that_load_their_libraries_are_left_alone(run):
    one = run(timeout_s=7.0)
    for state in one.ranks:
        state.phase = Phase.STARTING
    for count in range(40):
        one.controller.faults = {0: count, 1: 5}
        assert one.rest(1) is None
    told_after(one, least=6, most=11)


@pytest.mark.parametrize("stage", ["importing torch", "setting up"])
def test_ranks_of_a_script_that_import_torch_are_left_alone_while_they_touch_new_memory(run, stage):
    one = run(timeout_s=7.0, program=CommandProgram)
    for state in one.ranks:
        state.phase, state.stage = Phase.STARTING, stage
    for count in range(40):
        one.controller.faults = {0: count, 1: 5}
        assert one.rest(1) is None
    told_after(one, least=6, most=11)


def test_ranks_that_import_the_compiler_of_torch_while_they_join_a_replica_are_left_alone(run):
    one = run(timeout_s=7.0, program=PythonProgram)
    for state, box in zip(one.ranks, one.boxes, strict=True):
        state.phase, state.stage = Phase.STARTING, "setting up"
        tag = box.join_group((0, 1))
        box.begin(COLLECTIVE, (DATA_PARALLEL_START, None), None, peer=GROUP, tag=tag, size=0, now=10)
    for count in range(40):
        one.controller.faults = {0: count, 1: 5}
        assert one.rest(1) is None
    told_after(one, least=6, most=11)


def test_ranks_of_a_script_that_have_run_all_of_their_code_may_take_two_minutes_to_end(run):
    one = run(timeout_s=7.0, program=PythonProgram)
    for state in one.ranks:
        state.in_flight = ErrorInFlight(error=None, left=100.0)
    told_after(one, least=120, most=124)


def test_a_rank_that_has_run_all_of_its_code_does_not_excuse_one_that_has_not(run):
    one = run(timeout_s=7.0, program=PythonProgram)
    one.ranks[0].in_flight = ErrorInFlight(error=None, left=100.0)
    told_after(one, least=7, most=13)


def test_a_rank_that_waits_in_any_other_operation_may_not_stand_still_while_it_touches_new_memory(run):
    one = run(timeout_s=7.0, program=PythonProgram)
    for state, box in zip(one.ranks, one.boxes, strict=True):
        state.phase, state.stage = Phase.STARTING, "setting up"
        box.begin(COLLECTIVE, ("all_reduce", None), None, peer=GROUP, tag=box.join_group((0, 1)), size=0, now=10)
    for count in range(20):
        one.controller.faults = {0: count, 1: 5}
        if one.rest(1) is not None:
            return
    pytest.fail("no hang was reported")


def test_a_script_that_has_begun_to_train_may_not_stand_still_while_it_touches_new_memory(run):
    one = run(timeout_s=7.0, program=CommandProgram)
    for state in one.ranks:
        state.phase, state.stage = Phase.STARTING, "the first backward pass"
    for count in range(12):
        one.controller.faults = {0: count, 1: 5}
        if one.rest(1) is not None:
            return
    pytest.fail("no hang was reported")


def test_ranks_that_load_their_libraries_on_other_hosts_are_looked_at_twice(run):
    one = run(timeout_s=7.0)
    one.controller.answers_at_once = False
    for state in one.ranks:
        state.phase = Phase.STARTING
    one.boxes[1].begin(COLLECTIVE, ("MPI_Init", None), None, peer=GROUP, tag=0, size=0, now=10)
    assert one.rest(0.5) is None
    for count in range(80):
        one.controller.faults = {0: count, 1: 5}
        assert one.rest(0.5) is None
    failure = told_after(one, least=1, most=14)
    assert (failure.code, failure.rank) == ("R014", 0)


def test_a_rank_that_does_not_come_to_mpi_init_is_named(run):
    one = run(timeout_s=7.0)
    for state in one.ranks:
        state.phase = Phase.STARTING
    one.boxes[0].begin(COLLECTIVE, ("MPI_Init", None), None, peer=GROUP, tag=0, size=0, now=10)
    failure = told_after(one, least=7, most=11)
    assert (failure.code, failure.rank, failure.when) == ("R014", 1, "while it was starting")


def test_ranks_that_mpirun_does_not_start_are_told(run):
    one = run(timeout_s=7.0)
    one.ranks[1].phase = Phase.WAITING
    assert one.rest(119) is None
    failure = told_after(one, least=1, most=3)
    assert (failure.code, failure.message) == ("R038", "mpirun has not started 1 of 2 ranks within 2 min")
    assert failure.evidence == ("on box: rank 1",)


def test_processes_that_end_have_two_minutes_for_it(run):
    one = run(timeout_s=7.0)
    for state, box in zip(one.ranks, one.boxes, strict=True):
        state.phase = Phase.DONE
        box.announce(DONE)
    assert one.rest(119) is None
    failure = told_after(one, least=1, most=6)
    assert (failure.code, failure.rank) == ("R014", 0)
    assert failure.cause.startswith("has returned from its role, and its process has not ended for 2 min")


def test_processes_that_end_are_not_waited_for_while_one_beside_them_is_stopped(run):
    one = run(timeout_s=7.0)
    for state, box in zip(one.ranks, one.boxes, strict=True):
        state.phase = Phase.DONE
        box.announce(DONE)
    one.controller.helpers = (("", StoppedHelper(rank=None, pid=12, name="prted", is_shim=False)),)
    failure = told_after(one, least=7, most=13)
    assert (failure.code, failure.host) == ("R064", "box")
    assert failure.cause.startswith(
        "`prted` (process 12) on this machine, a process of the launcher of ranks, was stopped "
    )


def test_a_rank_that_became_another_program_is_not_killed_by_the_request_for_its_stacks(run):
    one = run(timeout_s=7.0)
    about = {"name": "x", "program": "/bin/x", "does": "waits", "waits_in": ""}
    one.controller.processes = {rank: RankProcess(rank=rank, catches_crashes=rank == 0, **about) for rank in range(2)}
    told_after(one, least=7, most=13)
    assert [0] == one.controller.asked


def test_only_ranks_of_a_program_that_write_stacks_are_asked_and_by_their_own_signal(run):
    one = run(program=CommandProgram, timeout_s=7.0)
    about = {"name": "x", "program": "/bin/x", "does": "waits", "waits_in": "", "catches_crashes": True}
    one.controller.processes = {rank: RankProcess(rank=rank, writes_stacks=rank == 1, **about) for rank in range(2)}
    told_after(one, least=7, most=13)
    assert ([1], [contract.STACKS_SIGNAL]) == (one.controller.asked, one.controller.signals)


def test_a_program_that_is_silent_is_judged_only_where_that_was_asked_for(run, tmp_path):
    assert run(program=CommandProgram).rest(7200, tick=1.0) is None


def test_a_program_that_prints_now_and_then_is_left_alone(run, tmp_path):
    one = run(program=CommandProgram, timeout_s=7.0)
    path = tmp_path / contract.stdout_file(1)
    path.parent.mkdir()
    for count in range(5):
        path.write_text("." * count)
        assert one.rest(6.5) is None
    failure = told_after(one, least=0.5, most=6)
    assert (failure.code, failure.cause) == ("R017", "no rank has printed anything for 10 s")


@pytest.fixture
def parsed(monkeypatch):
    """The recorders that were parsed, each time."""
    found = []

    def parse(data):
        found.append(read_recorder(data))
        return found[-1]

    monkeypatch.setattr(flight_recorders, "read_recorder", parse)
    return found


def test_a_run_that_moves_has_no_recorder_parsed_however_long_its_pauses_are(run, parsed):
    one = run()
    one.steps(10, seconds=0.1)
    for step in range(11, 15):
        assert one.rest(25) is None
        one.boxes[step % 2].begin_step(step)
        one.boxes[step % 2].end_step(SECOND)
    assert [] == parsed


def test_a_long_phase_has_each_recorder_parsed_once(run, parsed):
    one = run()
    one.boxes[0].announce("evaluation")
    assert one.rest(100) is None
    assert [0, 1] == sorted(recording.rank for recording in parsed)


def test_a_wait_that_begins_in_a_long_pause_is_seen_although_the_recorder_was_parsed_before(run, parsed):
    one = run(timeout_s=2.0)
    at = one.boxes[1].begin(BEGUN_COLLECTIVE, ("all_reduce", None), None, peer=GROUP, tag=0, size=0, now=1)
    one.boxes[0].announce("evaluation")
    assert one.rest(10) is None
    one.boxes[1].begin_wait(at)
    assert one.rest(10) is None
    assert [False, True] == [one.waiting is not None for one in parsed if one.rank == 1]
