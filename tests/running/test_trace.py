"""The timeline of all ranks: one clock, slices that nest, and no message that arrives before it was sent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import FORKED
from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.telemetry import ClockNote, MessageEnd, Span, read_trace_event
from ttlaunch.running.metrics.trace import RankTrace, render_trace, write_trace

ROWS = [RankRow(0, "near", 0, "worker"), RankRow(1, "far", 0, "server")]
MS = 1_000_000


def trace_of(row, *, clocks=(), spans=(), ends=()):
    lines = [["clock", *one] for one in clocks] + [["span", *one] for one in spans] + [list(one) for one in ends]
    events = [read_trace_event(json.dumps(line).encode()) for line in lines]
    kinds = (ClockNote, Span, MessageEnd)
    return RankTrace(row, *([event for event in events if isinstance(event, kind)] for kind in kinds))


def message(number, peer):
    return {"peer": peer, "tag": 7, "number": number, "bytes": 4, "step": 1}


def events(found, kind):
    return [event for event in found["traceEvents"] if event["ph"] == kind]


def test_times_of_a_rank_are_put_on_the_clock_of_rank_0():
    """Rank 1's clock is 5 s behind before and 5.010 s behind after, 10 s later: it loses 1 ms a second."""
    clocks = [(0, 5000 * MS, 20_000), (10_000 * MS, 5010 * MS, 30_000)]
    far = trace_of(ROWS[1], clocks=clocks, spans=[("update", "update", 5000 * MS, 6000 * MS, {})])
    assert 5000 * MS + 5005 * MS == far.on_rank_0(5000 * MS)
    near = trace_of(ROWS[0], spans=[("step 1", "step", 10_000 * MS, 10_001 * MS, {})])
    found = render_trace([near, far])
    assert [(0, 0.0, 1000.0), (1, 5000.0, 1_001_000.0)] == [(x["pid"], x["ts"], x["dur"]) for x in events(found, "X")]
    assert [0.0, 30.0] == [clock["error_us"] for clock in found["otherData"]["clocks"]]


def test_an_arrow_joins_the_two_ends_of_each_message():
    sends = [("send", "gradients", (10 + number) * MS, message(number, 1)) for number in (1, 2)]
    receives = [("recv", "gradients", (20 + number) * MS, message(number, 0)) for number in (1, 2, 3)]
    spans = [("step 1", "step", 0, 30 * MS, {})]
    found = render_trace([trace_of(ROWS[0], spans=spans, ends=sends), trace_of(ROWS[1], spans=spans, ends=receives)])
    begins, ends = events(found, "s"), events(found, "f")
    assert [(0, 11_000.0, 1), (0, 12_000.0, 2)] == [(one["pid"], one["ts"], one["id"]) for one in begins]
    assert [(1, 21_000.0, 1), (1, 22_000.0, 2)] == [(one["pid"], one["ts"], one["id"]) for one in ends]
    assert {"e"} == {one["bp"] for one in ends}


def test_a_run_without_a_trace_gets_no_timeline(tmp_path):
    assert write_trace(tmp_path, ROWS) is None
    assert [] == list(tmp_path.iterdir())


def test_a_line_that_was_cut_off_is_passed_over(tmp_path):
    (tmp_path / contract.RECORDS_DIR).mkdir()
    lines = '["clock",1,2,3]\n["span","forward 0","forward",10,20,{"step":1}]\n["span","backwa'
    (tmp_path / contract.trace_file(0)).write_text(lines)
    found = json.loads(write_trace(tmp_path, ROWS).read_text())
    assert ["forward 0"] == [event["name"] for event in events(found, "X")]


def check_nested(slices):
    """Slices of a process contain each other or have nothing in common, to the nanosecond."""
    open_ends = []
    for one in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        began, ended = round(one["ts"] * 1000), round((one["ts"] + one["dur"]) * 1000)
        while open_ends and open_ends[-1] <= began:
            open_ends.pop()
        assert not open_ends or ended <= open_ends[-1], one
        open_ends.append(ended)


SMALL = {
    "training_config.steps": 6,
    "training_config.batch_size": 4,
    "training_config.micro_batch_size": 1,
    "transformer_config.embedding_dim": 16,
    "transformer_config.max_sequence_length": 16,
    "checkpoint_config.interval": "null",
}


def traced(folder, recipe, **settings):
    """Run a recipe with real ranks, tracing three of its six steps, and load the timeline."""
    words = [word for key, value in (SMALL | settings).items() for word in ("--set", f"{key}={value}")]
    command = [
        Path(sys.executable).with_name("ttlaunch"),
        "run",
        recipe,
        "--trace",
        "--trace-steps",
        "3",
        *FORKED,
        *words,
    ]
    process = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == process.returncode, process.stderr
    (path,) = folder.glob(f"runs/*/{contract.TRACE_FILE}")
    assert f"timeline         {path.relative_to(folder)}, for https://ui.perfetto.dev" in process.stdout
    return json.loads(path.read_text())


def check_timeline(found, *, ranks):
    slices = events(found, "X")
    assert set(range(ranks)) == {one["pid"] for one in slices}
    for rank in range(ranks):
        check_nested([one for one in slices if one["pid"] == rank])
    errors = {clock["rank"]: clock["error_us"] for clock in found["otherData"]["clocks"]}
    assert all(errors[rank] > 0 for rank in range(1, ranks))
    ends = {arrow["id"]: arrow for arrow in events(found, "f")}
    for sent in events(found, "s"):
        received = ends[sent["id"]]
        assert sent["name"] == received["name"]
        assert received["ts"] >= sent["ts"] - errors[sent["pid"]] - errors[received["pid"]]
    assert len(ends) == len(events(found, "s"))
    return slices


@pytest.mark.mpi
def test_a_traced_run_shows_passes_and_messages_of_its_first_steps(tmp_path):
    found = traced(tmp_path, "hierarchical_parallel")
    slices = check_timeline(found, ranks=4)
    assert {"step 1", "step 2", "step 3"} == {one["name"] for one in slices if one["cat"] == "step"}
    passes = [one["name"] for one in slices if one["pid"] == 0 and one["cat"] in {"forward", "backward"}]
    assert ["forward 0", "backward 0", "forward 1", "backward 1"] * 3 == passes
    assert {3} == {one["pid"] for one in slices if one["cat"] == "update"}
    flows = {name.split()[0] for name in (arrow["name"] for arrow in events(found, "s"))}
    assert {"weights", "gradients", "counts", "validation", "bucket_size"} == flows
    assert 3 * 2 <= len([one for one in events(found, "s") if one["name"].startswith("gradients") and one["pid"] < 2])


@pytest.mark.mpi
def test_a_traced_pipeline_shows_every_micro_batch_on_every_stage(tmp_path):
    slices = check_timeline(traced(tmp_path, "pipeline_parallel"), ranks=2)
    for stage in range(2):
        passes = [one["name"] for one in slices if one["pid"] == stage and one["cat"] in {"forward", "backward"}]
        expected = [f"{kind} {index}" for kind in ("forward", "backward") for index in range(4)]
        assert sorted(expected * 3) == sorted(passes)


@pytest.mark.mpi
def test_what_torch_reduces_is_named_beside_the_ranks_own_work(tmp_path):
    """E8: the trace names the collectives."""
    settings = {"data_parallel_config.reduction": "fast", "multihost_config.num_workers": 2}
    found = traced(tmp_path, "data_parallel", **settings)
    check_timeline(found, ranks=2)
    begun = [one for one in events(found, "b") if one["name"] == "all_reduce (torch)"]
    assert {0, 1} == {one["pid"] for one in begun}
    assert 3 <= len([one for one in begun if one["pid"] == 0])  # one a step, or one for each of torch's buckets
    ended = {one["id"]: one["ts"] for one in events(found, "e")}
    assert all(one["args"]["bytes"] > 0 and ended[one["id"]] >= one["ts"] for one in begun)


def test_a_program_has_no_timeline(ttlaunch, here):
    (here / "train.py").write_text("print('hello')\n")
    answer = ttlaunch("run train.py --trace")
    first, *_ = answer.stderr.splitlines()
    assert (2, "error[P009]: `--trace` was given, but train is a program and no recipe") == (answer.status, first)
