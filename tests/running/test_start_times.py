"""Where the time from Enter to the first step of a run went."""

import json
from types import SimpleNamespace

import pytest

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.ranks import Ready, Started, Starting, StepDone
from ttlaunch.running.runs.run_folder import RunFolder, append_event, read_events
from ttlaunch.running.start_times import OF_RANKS, PARTS, find_start_times, marks_in, read_start_times
from ttlaunch.running.watch import RankState, Watch, fold

ENTER = 1_795_415_000.0
HERE = {"command": ENTER, "checks": ENTER + 0.1, "folder": ENTER + 0.3, "engine": ENTER + 0.35}
OVER_HOSTS = {"connections": ENTER + 0.12, "hosts": ENTER + 0.2, "sync": ENTER + 0.25, "agents": ENTER + 0.32}
JOINING, _, IMPORTING, _ = contract.START_STAGES
SCRIPT = ((IMPORTING, 0.5), (contract.STAGE_SETTING_UP, 2.5), (JOINING, 2.6), (contract.STAGE_SETTING_UP, 2.7))
PASS = (contract.STAGE_FIRST_PASS, 3.0)


def rank(number, *, started=0.4, stages=(), ready=None, step=None, later=False):
    """The state of a rank after its records, with seconds since Enter."""
    state = RankState(RankRow(number, "abc"[number], 0, "rank", later=later))
    records = [Started(time=ENTER + started, pid=7)]
    records += [Starting(time=ENTER + at, stage=stage) for stage, at in stages]
    records += [] if ready is None else [Ready(time=ENTER + ready)]
    records += [] if step is None else [StepDone(time=ENTER + step, step=1, values={})]
    for record in records:
        fold(state, record)
    return state


def found(*ranks, marks=HERE, printed=(), lasted=(), is_warm=False):
    printed = {number: ENTER + at for number, at in printed}
    return find_start_times(marks, ranks, printed=printed, lasted=dict(lasted), is_warm=is_warm)


def test_the_parts_of_a_script_follow_each_other_up_to_its_first_backward_pass():
    times = found(rank(0, stages=(*SCRIPT, PASS)))
    expected = {"command": 100, "checks": 200, "folder": 50, "engine": 50, "python": 100, "torch": 2000}
    assert {**expected, "setup": 100 + 300, "joining": 100} == times.parts
    assert ("pass", 3000) == (times.first_step, times.total_ms)


def test_the_rank_whose_first_step_came_last_is_the_one_that_is_divided():
    times = found(*(rank(number, stages=((IMPORTING, 0.5),), step=at) for number, at in enumerate((3.0, 5.0, 4.0))))
    assert (1, "b", 5000) == (times.rank, times.host, times.total_ms)


def test_a_worker_that_came_in_place_of_another_is_no_part_of_the_start():
    there = [rank(number, stages=((IMPORTING, 0.5),), step=3.0 + number) for number in range(2)]
    times = found(*there, rank(2, started=20.0, stages=((IMPORTING, 21.0),), step=25.0, later=True))
    assert (1, 4000) == (times.rank, times.total_ms)


def test_a_logged_step_counts_before_a_backward_pass_and_that_before_a_line_of_output():
    stages, printed = (*SCRIPT, PASS), [(0, 0.6)]
    logged = found(rank(0, stages=stages, step=3.5), printed=printed)
    assert ("step", 3500, 500) == (logged.first_step, logged.total_ms, logged.parts["first_step"])
    passed = found(rank(0, stages=stages), printed=printed)
    assert ("pass", 3000) == (passed.first_step, passed.total_ms)
    silent = found(rank(0, stages=SCRIPT), printed=[(0, 2.9)])
    assert ("output", 2900, 100 + 200) == (silent.first_step, silent.total_ms, silent.parts["setup"])


def test_stages_after_the_first_line_of_output_do_not_count():
    times = found(rank(0, stages=SCRIPT), printed=[(0, 0.45)])
    assert {"command": 100, "checks": 200, "folder": 50, "engine": 50, "python": 50} == times.parts


def test_a_program_has_one_part_until_its_first_line():
    times = found(rank(0), printed=[(0, 0.45)])
    assert (50, 450) == (times.parts["program"], times.total_ms)


def test_a_rank_that_started_by_itself_despite_warm_was_not_forked():
    assert not found(rank(0, stages=(*SCRIPT, PASS)), is_warm=True).is_warm
    assert found(rank(0, stages=(*SCRIPT[1:], PASS)), is_warm=True).is_warm


def test_over_hosts_what_is_done_to_them_is_divided_too():
    times = found(rank(0, stages=(*SCRIPT, PASS)), marks={**HERE, **OVER_HOSTS})
    expected = {"checks": 20, "connections": 80, "hosts": 50, "sync": 50, "folder": 20, "agents": 30, "engine": 50}
    assert expected == {part: times.parts[part] for part in expected}
    assert 3000 == times.total_ms


def test_the_first_step_of_a_recipe_is_told_from_its_set_up_where_its_duration_is_known():
    stages = ((JOINING, 0.5), (IMPORTING, 0.7), (contract.START_STAGES[3], 2.0))
    state = rank(0, stages=stages, ready=2.1, step=3.0)
    expected = {"python": 100, "joining": 200, "torch": 1300, "connecting": 100, "setup": 900}
    assert expected == {part: times for part, times in found(state).parts.items() if part in OF_RANKS}
    known = found(state, lasted=[(0, 0.25)])
    assert (650, 250, 3000) == (known.parts["setup"], known.parts["first_step"], known.total_ms)


@pytest.mark.parametrize("started", [0.2, 0.4, 9.0])
@pytest.mark.parametrize("lasted", [0.0, 0.25, 1e9])
def test_whatever_clocks_say_no_part_is_negative_and_the_parts_add_up(started, lasted):
    """A host's clock is known to some milliseconds only, and a rank may write what it wants."""
    times = found(rank(0, started=started, stages=(*SCRIPT, PASS), step=3.3333), lasted=[(0, lasted)])
    assert all(ms >= 0 for ms in times.parts.values())
    said = times.as_json()
    assert 3333 == times.total_ms == sum(times.parts.values())
    assert 3.333 == said["seconds"] == pytest.approx(sum(part["seconds"] for part in said["parts"]))
    assert set(times.parts) <= set(PARTS)


def test_nothing_is_said_before_the_first_step_and_of_a_run_without_marks():
    assert found(rank(0, stages=SCRIPT)) is None
    assert found(rank(0, step=3.0), marks={}) is None


def test_a_rank_that_begins_stages_for_ever_fills_no_memory():
    state = rank(0, stages=[("again and again", 0.5)] * 1000)
    assert len(state.stages) < 100


def test_marks_are_read_as_they_were_written(tmp_path):
    folder = RunFolder("r", tmp_path)
    append_event(folder, "start", engine="agents")
    append_event(folder, contract.EVENT_PREPARED, marks=HERE)
    other, prepared = read_events(tmp_path)
    assert ({}, HERE) == (marks_in(other), marks_in(prepared))


@pytest.mark.parametrize(
    "marks", [None, 3, [["command", 1.0]], {"command": "now"}, {"command": -1.0}, {"command": 1e30}]
)
def test_marks_of_another_kind_count_as_none(marks):
    assert {} == marks_in({"event": contract.EVENT_PREPARED, "marks": marks})


def test_marks_with_other_names_are_left_out():
    marks = {**HERE, "torch": ENTER, "\x1b[2J": ENTER}
    assert HERE == marks_in({"event": contract.EVENT_PREPARED, "marks": marks})


def test_times_of_a_host_whose_clock_is_ahead_are_those_of_this_machine(tmp_path):
    rows = (RankRow(0, "a", 0, "rank"), RankRow(1, "b", 0, "rank"))
    folder, ahead = RunFolder("r", tmp_path), 3600.0
    for name in (contract.RECORDS_DIR, contract.LOGS_DIR):
        (tmp_path / name).mkdir()
    append_event(folder, contract.EVENT_CLOCK, host="b", offset_s=ahead)
    append_event(folder, contract.EVENT_PREPARED, marks=HERE)
    for number, offset in enumerate((0.0, ahead)):
        started = {"kind": contract.KIND_STARTED, "time": ENTER + offset + 0.4, "pid": 7}
        (tmp_path / contract.progress_file(number)).write_text(contract.record_line(started))
        (tmp_path / contract.times_file(number)).write_text(f"{ENTER + offset + 0.5 + number} 1 7\n")
    watch = Watch(SimpleNamespace(ranks=rows), folder)
    watch.set_clock("b", ahead)
    watch.read_all()
    times = read_start_times(tmp_path, watch.ranks, {"recipe": None})
    assert (1, "b", 1500, 1100) == (times.rank, times.host, times.total_ms, times.parts["program"])


@pytest.mark.parametrize("text", ["", "no note\n", f"{ENTER} 1 5 end\n", "1e99 1 5\n", "x" * 100_000])
def test_notes_of_output_that_no_shim_writes_are_no_first_step(tmp_path, text):
    (tmp_path / contract.LOGS_DIR).mkdir()
    append_event(RunFolder("r", tmp_path), contract.EVENT_PREPARED, marks=HERE)
    (tmp_path / contract.times_file(0)).write_text(text)
    assert read_start_times(tmp_path, [rank(0)], {"recipe": None}) is None


TRAINING = """\
import torch
print("a line that is no step", flush=True)
loss = torch.ones(2, requires_grad=True).sum()
loss.backward()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("warm", [(), ("--warm",)])
def test_the_report_of_a_real_run_says_where_the_time_to_the_first_pass_went(here, start_run, ttlaunch, warm):
    (here / "train.py").write_text(TRAINING)
    run = start_run(*(("-n", "2", "--independent", *warm) if warm else ("-n", "1")), "train.py")
    assert 0 == run.ends(within_s=90), run.stderr
    said = json.loads(ttlaunch("report --format json").stdout)["start_times"]
    assert said == run.report["start_times"]
    names = [part["part"] for part in said["parts"]]
    assert ["command", "checks", "folder", "engine", "python", *([] if warm else ["torch"]), "setup"] == names
    assert ("pass", bool(warm)) == (said["first_step"], said["is_warm"])
    assert said["seconds"] == pytest.approx(sum(part["seconds"] for part in said["parts"]))
    assert all(part["seconds"] >= 0 for part in said["parts"])
    assert 0 < said["seconds"] < run.report["duration_s"] + 60
    lines = ttlaunch("report").stdout
    assert f"  together  {said['seconds'] * 1000:,.0f}".split() in [line.split() for line in lines.splitlines()]
    assert "measured to the beginning of the first backward pass of rank" in lines
    concise = ttlaunch("report --format concise").stdout.splitlines()
    assert len(names) == sum(line.startswith("start\t") for line in concise)
