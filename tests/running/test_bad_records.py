"""A record that cannot be used is one warning that names its rank and its host; all else that the run wrote stands."""

import json
import random
import struct
from types import SimpleNamespace

import pytest

from tests.records.written import progress
from ttlaunch import contract
from ttlaunch.flight_recorder import MAGIC, SIZE, WORD_MAGIC, read_recorder
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.parser import LONGEST_RECORD
from ttlaunch.running.bad_records import BadLine, BadRecords, report_bad_records
from ttlaunch.running.checkpoints.complete import complete_checkpoints
from ttlaunch.running.flight_recorders import last_operation
from ttlaunch.running.metrics.telemetry import read_telemetry
from ttlaunch.running.metrics.trace import read_traces
from ttlaunch.running.runs.run_folder import RunFolder, read_events
from ttlaunch.running.watch import Phase, Watch

ROWS = (RankRow(0, "metal-01", 0, "worker"), RankRow(1, "metal-04", 0, "aggregator"))
GOOD = {"kind": "step", "time": 5.0, "step": 2, "loss": 1.5}


@pytest.fixture
def watch(tmp_path):
    (tmp_path / contract.RECORDS_DIR).mkdir()
    return Watch(SimpleNamespace(ranks=ROWS), RunFolder("run", tmp_path))


def write(folder, rank, *lines):
    with (folder / contract.progress_file(rank)).open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))


def reported(watch, folder):
    said = []
    report_bad_records(watch.bad, ROWS, folder=RunFolder("run", folder), output=lambda *line: said.append(line))
    return said


def test_the_first_bad_line_of_a_file_is_told_once_and_the_rest_counts(watch, tmp_path):
    good = contract.record_line(GOOD).strip().encode()
    write(tmp_path, 1, good, b"Epoch 1/10", *[b'{"kind": "step", "time": 1, "step": "x"}'] * 1000)
    assert [progress(GOOD)] == [record for _, record in watch.poll()]
    said = reported(watch, tmp_path)
    whose = "rank 1 (aggregator, metal-04) wrote a record that cannot be used"
    what = "line 2 of records/rank-1.progress.jsonl: it is no JSON: Expecting value: line 1 column 1 (char 0)"
    assert [("stderr", f"warning[R063]: {whose}: {what}".encode())] == said
    [event] = read_events(tmp_path)
    assert ("bad_record", 1, 2) == (event["event"], event["rank"], event["line"])
    write(tmp_path, 1, b"Epoch 2/10", contract.record_line({**GOOD, "step": 3}).strip().encode())
    watch.poll()
    assert ([], 3) == (reported(watch, tmp_path), watch.ranks[1].step)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"status": "none"}',
        '{"status": 1' + "0" * 5000 + "}",
        '{"status": 0, "time": 1e999}',
        "[" * 9999,
    ],
)
def test_an_end_that_cannot_be_read_is_told_and_is_no_end(watch, tmp_path, content):
    (tmp_path / contract.exit_file(0)).write_text(content)
    (tmp_path / contract.error_file(1)).write_text(json.dumps({"type": "ValueError", "message": "no", "time": 2.0}))
    watch.poll()
    assert (None, Phase.WAITING, Phase.FAILED) == (watch.ranks[0].exit, watch.ranks[0].phase, watch.ranks[1].phase)
    [(_, line)] = reported(watch, tmp_path)
    assert b"rank 0 (worker, metal-01) wrote a record that cannot be used: records/rank-0.exit.json: " in line


def test_a_line_without_an_end_fills_no_memory(watch, tmp_path):
    with (tmp_path / contract.progress_file(0)).open("wb") as file:
        file.write(b"x" * (LONGEST_RECORD + 2**21))
    assert [] == watch.poll()
    assert len(watch._tails[0]._rest) <= LONGEST_RECORD + 1
    write(tmp_path, 0, b"", contract.record_line(GOOD).strip().encode())
    assert [2] == [record.step for _, record in watch.poll()]
    assert "it is longer than 16 MiB" == next(watch.bad.fresh()).reason


@pytest.mark.timeout(20)
def test_terabytes_of_nothing_cost_no_time_and_no_memory(watch, tmp_path):
    write(tmp_path, 0, contract.record_line(GOOD).strip().encode())
    path = tmp_path / contract.progress_file(0)
    with path.open("ab") as file:
        file.truncate(2**43)
    assert [2] == [record.step for _, record in watch.poll()]
    with path.open("ab") as file:
        file.write(b"\n" + contract.record_line({**GOOD, "step": 3}).encode())
    assert [3] == [record.step for _, record in watch.poll()]
    assert "it is no JSON" in next(watch.bad.fresh()).reason


def test_a_full_disk_does_not_keep_the_warning_from_being_told(tmp_path):
    bad, said = BadRecords(), []
    bad.add(BadLine(0, "records/rank-0.exit.json", None, "it is no JSON"))
    folder = RunFolder("run", tmp_path / "gone")
    report_bad_records(bad, ROWS, folder=folder, output=lambda *line: said.append(line))
    assert 1 == len(said)


def test_a_flight_recorder_of_random_words_is_read_and_told(tmp_path):
    draw = random.Random(7)  # noqa: S311 - any bytes will do
    for _ in range(50):
        words = bytearray(draw.randbytes(SIZE))
        struct.pack_into("=q", words, 8 * WORD_MAGIC, MAGIC)
        box = read_recorder(bytes(words))
        assert box.operations
        last = last_operation(box, roles=["worker"], end=5.0)
        assert last is None or last.text


@pytest.mark.mpi
def test_a_run_whose_rank_writes_nonsense_comes_to_its_end(start_run, here):
    path = repr(contract.progress_file(0))
    (here / "work.py").write_text(
        f"import os\nopen(os.environ['TTLAUNCH_RUN_DIR'] + '/' + {path}, 'a').write('[' * 9999 + '\\n')\n"
    )
    run = start_run("--ranks", "1", "--", "python3", "work.py")
    assert 0 == run.ends(within_s=60)
    warning = "warning[R063]: rank 0 (rank, localhost) wrote a record that cannot be used: line 2 of records/"
    assert 1 == (run.stdout + run.stderr).count(warning)
    assert "warning[R063]: 1 file of the run had records that could not be used; all else counts" in run.stderr
    assert "done" == run.report["status"]


GOOD_SHARD = {"step": 10, "owners": [0, 1], "state": {}, "size": 4, "sha256": "0", "tensors": ["w"]}
SHARD_PLAN = {"hash": "h", "recipe": {"name": "r"}, "layout": "l", "world_size": 2, "config": {}, "data": None}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"size": "large"}, "`size` is 'large', expected a number of bytes"),
        ({"owners": [0, 2]}, "`owners` names rank 2 of 2"),
        ({"owners": None}, "`owners` is None, expected a list"),
        ({"state": [1]}, "`state` is a list of 1, expected an object"),
    ],
)
def test_a_bad_record_of_a_shard_costs_its_checkpoint_and_no_other(tmp_path, changed, reason):
    told = []
    for step, record in ((10, GOOD_SHARD), (20, GOOD_SHARD | changed)):
        folder = tmp_path / f"{contract.checkpoint_dir(step)}.tmp"
        folder.mkdir(parents=True)
        for rank in (0, 1):
            (folder / contract.shard_file(rank)).write_bytes(b"1234")
            (folder / contract.shard_record(rank)).write_text(json.dumps(record if rank else GOOD_SHARD))
    assert [10] == complete_checkpoints(tmp_path, SHARD_PLAN, run_id="run", complain=told.append)
    assert [BadLine(1, "checkpoints/step-20.tmp/rank-1.json", None, reason)] == told


def test_a_bad_line_of_a_ledger_or_a_trace_is_told_and_the_others_count(tmp_path):
    (tmp_path / contract.RECORDS_DIR).mkdir()
    stretch = {"format": contract.TRAFFIC_FORMAT, "first": 0, "last": 2, "facts": {}, "sent": [], "waited": []}
    lines = [json.dumps({**stretch, "spent": [["step", {step: 100}]]}) for step in ("1", "x", "2")]
    for rank in range(2):
        (tmp_path / contract.traffic_file(rank)).write_text("\n".join(lines[:: 2 - rank]) + "\n{torn")
        (tmp_path / contract.trace_file(rank)).write_text('["span", "s", "step", 1, 2, {}]\n["span", 5]\n')
    told = []
    telemetry = read_telemetry(tmp_path, world_size=2, complain=told.append)
    assert [{1: 100, 2: 100}] * 2 == [entry.steps for entry in telemetry]
    traces = read_traces(tmp_path, ROWS, complain=told.append)
    assert [1, 1] == [len(trace.spans) for trace in traces]
    assert [(1, 2, "ledger"), (0, 2, "trace"), (1, 2, "trace")] == [
        (one.rank, one.line, one.file.split(".")[1]) for one in told
    ]
