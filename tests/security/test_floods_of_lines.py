"""Ranks that write millions of tiny lines into a file of records: a look at the run stays short, and its end too."""

import json
from types import SimpleNamespace

import pytest

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records import ranks as rank_records
from ttlaunch.records.telemetry import read_stretch
from ttlaunch.running import watch as watching
from ttlaunch.running.bad_records import MOST_BAD_LINES
from ttlaunch.running.logs import merge
from ttlaunch.running.metrics import telemetry
from ttlaunch.running.runs.run_folder import RunFolder
from ttlaunch.running.watch import Watch

ROWS = (RankRow(0, "box", 0, "worker"), RankRow(1, "lab", 0, "worker"))
NOTE = b'{"kind":"note","time":1,"text":""}\n'
STEP = b'{"kind": "step", "time": 5.0, "step": 7, "loss": 1.5}\n'
STRETCH = {"format": contract.TRAFFIC_FORMAT, "first": 0, "last": 4, "facts": {}, "sent": [], "waited": [], "spent": []}


@pytest.fixture
def folder(tmp_path):
    for name in (contract.RECORDS_DIR, contract.LOGS_DIR):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def watch(folder):
    return Watch(SimpleNamespace(ranks=ROWS), RunFolder("run", folder))


def counted(monkeypatch, module, name):
    """Count the calls of a parser that a module uses; the parser itself does what it always does."""
    parse, calls = getattr(module, name), []

    def parse_and_count(line, **known):
        calls.append(None)
        return parse(line, **known)

    monkeypatch.setattr(module, name, parse_and_count)
    return calls


@pytest.mark.parametrize("line", [b"\n", b"a\n", b"{}\n", b"\r\n", b"\r" * 9 + b"\n"])
def test_after_10000_bad_lines_the_rest_of_a_file_is_passed_over_which_is_said_once(folder, watch, monkeypatch, line):
    (folder / contract.progress_file(0)).write_bytes(STEP + line * 300_000 + b"\n" + STEP)
    (folder / contract.progress_file(1)).write_bytes(STEP)
    calls = counted(monkeypatch, watching, "read_progress")
    assert 2 == len(watch.poll())
    assert len(calls) <= MOST_BAD_LINES + 2
    assert [7, 7] == [state.step for state in watch.ranks]
    [first, last] = watch.bad.fresh()
    assert (0, False, True) == (first.rank, first.is_last, last.is_last)
    assert "it is the 10,000th such line, so the rest of the file is passed over" == last.reason
    with (folder / contract.progress_file(0)).open("ab") as file:
        file.write(line * 1000)
    assert ([], []) == (watch.poll(), list(watch.bad.fresh()))


def test_a_look_reads_a_part_of_what_a_rank_writes_and_the_end_reads_the_rest_in_its_order(folder, watch, monkeypatch):
    notes = [
        contract.record_line({"kind": "note", "time": float(at), "text": "x" * 90}).encode() for at in range(30_000)
    ]
    (folder / contract.progress_file(0)).write_bytes(b"".join(notes))
    (folder / contract.progress_file(1)).write_bytes(STEP)
    calls = counted(monkeypatch, watching, "read_progress")
    looked = list(watch.look())
    assert len(calls) < 6_000
    assert 7 == watch.ranks[1].step
    for _ in range(3):
        looked += watch.look()
    assert 15_000 < len(looked) < 30_000
    times = [record.time for state, record in [*looked, *watch.records()] if state.row.rank == 0]
    assert [float(at) for at in range(30_000)] == times


def test_records_that_are_parted_by_carriage_returns_are_no_way_around_the_limit_of_a_look(folder, watch, monkeypatch):
    (folder / contract.progress_file(0)).write_bytes(NOTE.replace(b"\n", b"\r") * 100_000 + b"\n")
    calls = counted(monkeypatch, watching, "read_progress")
    list(watch.records())
    assert len(calls) < 1000


@pytest.mark.parametrize("line", [b"\n", b"1 1 1\n"])
def test_a_look_reads_a_part_of_the_notes_about_a_ranks_output(folder, monkeypatch, line):
    (folder / contract.times_file(0)).write_bytes(line * 500_000)
    calls = counted(monkeypatch, merge, "read_output_note")
    outputs = merge.RankOutputs(folder, [0, 1])
    outputs.poll()
    assert 0 < len(calls) < 100_000


def test_a_ledger_of_tiny_lines_is_passed_over(folder, monkeypatch):
    good = json.dumps(STRETCH).encode() + b"\n"
    for rank, rest in ((0, b"{}\n" * 300_000), (1, b"")):
        (folder / contract.traffic_file(rank)).write_bytes(good + rest)
    calls = counted(monkeypatch, telemetry, "read_stretch")
    told = []
    assert 2 == len(telemetry.read_telemetry(folder, world_size=2, complain=told.append))
    assert len(calls) == MOST_BAD_LINES + 2
    assert told[-1].is_last


@pytest.mark.parametrize(
    ("last", "rows", "reason"),
    [
        (40, [[1, 41, 1, 2, 100]], "`sent` names steps 1 to 41 by 1"),
        (40, [[1, 40, 1, 2, 100]] * 2, "`sent` names steps 1 to 40 by 1"),
        (41, [], "`last` is 41, after the last step 40"),
    ],
)
def test_a_line_of_a_ledger_names_no_more_steps_than_its_plan_has(folder, last, rows, reason):
    plan = {"config": {"training_config": {"steps": 20}}}
    (folder / contract.PLAN_FILE).write_text(json.dumps(plan))
    line = json.dumps({**STRETCH, "last": last, "sent": [["gradients", None, "backward", 1, rows]]})
    good = json.dumps({**STRETCH, "last": 40, "sent": [["gradients", None, "backward", 1, [[0, 40, 1, 2, 100]]]]})
    for rank in (0, 1):
        (folder / contract.traffic_file(rank)).write_text(f"{line}\n{good}\n")
    told = []
    found = telemetry.read_telemetry(folder, world_size=2, complain=told.append)
    assert [reason, reason] == [one.reason for one in told]
    assert [40, 40] == [entry.last for entry in found]


def test_a_row_of_two_far_steps_is_as_good_as_any():
    """A run that goes on from a late step has sent the same before its first step and in it."""
    rows = [[0, 500_001, 500_001, 2, 100]]
    line = json.dumps({**STRETCH, "last": 500_001, "sent": [["losses", None, "start", 1, rows]]}).encode()
    assert (0, 500_001) == (read_stretch(line, world_size=2).sent[0].first, read_stretch(line, world_size=2).last)


@pytest.mark.parametrize("line", [b"", b"a", b"Epoch 1/10", b"}"])
def test_what_cannot_begin_a_record_is_refused_without_a_parser(monkeypatch, line):
    reason = rank_records.read_progress(line).reason
    monkeypatch.setattr("ttlaunch.records.parser.json", None)
    assert reason == rank_records.read_progress(line).reason
    assert "it is no JSON: Expecting value: line 1 column 1 (char 0)" == reason
