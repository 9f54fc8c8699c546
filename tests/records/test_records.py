"""What ranks, shims and agents write: a typed value for what is right, one clause for what is wrong, never an exception."""

import ast
import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ttlaunch
from tests.examples import examples
from ttlaunch import contract
from ttlaunch.records import agents, endings, parser, ranks, telemetry
from ttlaunch.records.parser import BadRecord

TIME = 1_790_000_000.5
PROGRESS = [
    {"kind": "started", "time": TIME, "pid": 12, "shim_pid": 11, "host": "box"},
    {"kind": "ready", "time": TIME, "total_steps": 100},
    {"kind": "step", "time": TIME, "step": 3, "loss": 2.5, "tokens": 64, "grad_norm": 0.5, "arrived_from": 1},
    {"kind": "validation", "time": TIME, "step": 0, "loss": 4.0, "tokens": 64, "perplexity": 54.6},
    {"kind": "update", "time": TIME, "step": 3, "task": 4, "parts": [[0, 3, 2], [3, 7, 1]]},
    {"kind": "layer_grad_norms", "time": TIME, "step": 3, "norms": {"embedding": 0.5, "blocks.0": 1.5}},
    {"kind": "lost_checkpoint", "time": TIME, "step": 20, "reason": "disk full"},
    {"kind": "stopping", "time": TIME, "step": 7},
    {"kind": "note", "time": TIME, "text": "all well"},
    {"kind": "parameters", "time": TIME, "digests": {"w": "0" * 64}},
    {"kind": "result", "time": TIME, "values": {"stale gradients": 3, "network": "eth0"}},
    {"kind": "done", "time": TIME},
    {"kind": "of_my_own", "time": TIME, "step": 1, "colour": "red"},
]
EXIT = {"rank": 0, "pid": 12, "started": TIME, "time": TIME, "status": 0, "signal": None, "left_early": False}
EXIT |= {"peak_memory_bytes": 300_000_000, "oom_kills": None, "memory_limit_bytes": None, "left_behind": 0}
EXIT |= {"unkept_output": {"stdout": 5}, "unkept_reason": "no space"}
ERROR = {"type": "ValueError", "message": "no", "traceback": "…", "file": "/a.py", "line": 3, "step": 0}
ERROR |= {"role": "worker", "time": TIME}
SHARD = {"format": 1, "step": 20, "owners": [0, 1], "state": {"step": 20, "seen": [1, [2]]}, "size": 1000}
SHARD |= {"sha256": "0" * 64, "tensors": ["w", "optimizer.w"]}
STRETCH = {
    "format": contract.TRAFFIC_FORMAT,
    "first": 0,
    "last": 4,
    "facts": {"values": 1000},
    "sent": [["gradients", None, "backward", 1, [[1, 4, 1, 2, 100]]], ["losses", 2, "start", 1, [[0, 0, 1, 1, 8]]]],
    "waited": [["weights", "exchange", {"1": 1500}]],
    "spent": [["step", {"1": 6000}]],
}
FACTS = {"peer": 1, "tag": 3, "number": 1, "bytes": 100, "step": 1}
EVENTS = [
    ["clock", 1000, -5, 3],
    ["span", "step 1", "step", 1000, 2000, {"micro_batch": 0}],
    ["send", "gradients", 1000, FACTS],
    ["recv", "gradients", 1000, FACTS],
]
FRAMES = [
    {"kind": "ready", "version": 1, "time": TIME, "clock": 5.0, "done": 0, "pid": 7},
    {"kind": "alive", "clock": 5.0, "done": 3},
    {"kind": "gone", "reason": "ended"},
    {"kind": "file", "name": "records/rank-1.exit.json", "offset": 0, "whole": True, "number": 1},
    {"kind": "lost_shim", "rank": 1, "time": TIME},
    {"kind": "looked", "question": 1, "stopped": [0], "faults": [[0, 7], [1, 8]]},
    {"kind": "ended", "killed": 2},
    {"kind": "ranks_ended", "status": 137, "said": "a line"},
    {"kind": "ready", "version": 3, "time": TIME, "clock": 5.0, "done": 0, "pid": 7, "ports": [61000, 61001]},
]
READERS = [
    *((ranks.read_progress, one) for one in PROGRESS),
    (lambda line: parser.read(endings.RankExit, line), EXIT),
    (lambda line: parser.read(endings.RankError, line), ERROR),
    (lambda line: parser.read(endings.ShardRecord, line), SHARD),
    (lambda line: telemetry.read_stretch(line, world_size=2), STRETCH),
    *((telemetry.read_trace_event, one) for one in EVENTS),
    *((lambda line: agents.parse_agent_frame(header_of(line), ranks=[0, 1]), one) for one in FRAMES),
]
NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 2**31, 2**53, 2**53 + 1, 2**63, 10**400, 1e308, "nan", "inf", "\ud800", "", "x" * 5000]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
)


def header_of(line):
    """A frame's header, which has been read as JSON when its meaning is asked for."""
    content = json.loads(line)
    return content if isinstance(content, dict) else {}


def places(value, path=()):
    """The path of every value inside one."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from places(one, (*path, name))


def check_typed_or_told(found):
    """A record, or a clause that can be shown to somebody."""
    if isinstance(found, BadRecord):
        assert found.reason.strip()
        assert len(found.reason) < 300
        found.reason.encode()
    else:
        assert type(found).__module__.startswith("ttlaunch.records.")


@pytest.mark.parametrize(("read", "content"), READERS, ids=[str(one)[:40] for _, one in READERS])
def test_what_is_written_today_is_read(read, content):
    assert not isinstance(read(json.dumps(content).encode()), BadRecord)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(READERS), st.data())
def test_a_record_with_anything_in_a_place_is_typed_or_told(reader, data):
    read, content = reader
    changed = copy.deepcopy(content)
    path = data.draw(st.sampled_from([path for path in places(content) if path]))
    parent = changed
    for name in path[:-1]:
        parent = parent[name]
    if data.draw(st.booleans()):
        parent[path[-1]] = data.draw(NASTY)
    else:
        del parent[path[-1]]
    check_typed_or_told(read(json.dumps(changed).encode()))


@pytest.mark.parametrize("kind", ["\ud800", "x" * 5000, None, 7, ["said"]])
def test_a_message_of_an_agent_of_no_kind_is_told_in_few_printable_words(kind):
    check_typed_or_told(agents.parse_agent_frame({"kind": kind}))


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(READERS[: -len(FRAMES)]), st.data())
def test_torn_and_broken_bytes_are_typed_or_told(reader, data):
    read, content = reader
    line = bytearray(json.dumps(content).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(line) - 1))
        line[place : place + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=4)) or b"]"
    check_typed_or_told(read(bytes(line)))


@given(st.binary(max_size=60))
@example(b"1790000000.5 1 20 end")
@example(b"nan 1 20")
@example(b"1790000000.5 1 " + b"9" * 5000)
def test_any_line_of_times_is_typed_or_told(line):
    found = endings.read_output_note(line)
    assert isinstance(found, BadRecord) or (found.end >= 0 and math.isfinite(found.time))


def bad(found):
    assert isinstance(found, BadRecord)
    return found.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 10**400}, "`step` is a number too large, expected a whole number from 0 to 2**53"),
        ({"step": True}, "`step` is True, expected a whole number from 0 to 2**53"),
        ({"step": -1}, "`step` is -1, expected a whole number from 0 to 2**53"),
        ({"time": "soon"}, "`time` is 'soon', expected seconds since 1970"),
        ({"time": math.nan}, "`time` is nan, expected seconds since 1970"),
        ({"loss": "low"}, "`values.loss` is 'low', expected a number"),
        ({"loss": [1, 2]}, "`values.loss` is a list of 2, expected a number"),
        ({"kind": 7}, "`kind` is 7, expected a text"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(changes, reason):
    content = {"kind": "step", "time": TIME, "step": 3, "loss": 2.5} | changes
    assert reason == bad(ranks.read_progress(json.dumps(content).encode()))


def test_a_missing_field_is_named():
    assert "`pid` is missing, expected a value" == bad(ranks.read_progress(b'{"kind": "started", "time": 1.0}'))


def test_a_number_of_four_thousand_digits_and_one_of_five_thousand_are_bad_records():
    for digits in (4000, 5000):
        assert bad(ranks.read_progress(b'{"kind": "step", "time": 1.0, "step": ' + b"9" * digits + b"}"))


def test_depth_is_known_before_anything_is_parsed():
    deep = b'{"kind": "result", "time": 1.0, "values": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    assert f"it is nested more than {parser.DEEPEST} deep" == bad(ranks.read_progress(deep))
    assert parser.is_shallow(b"[" * parser.DEEPEST + b"]" * parser.DEEPEST)
    assert not parser.is_shallow(b"[" * (parser.DEEPEST + 1) + b"]" * (parser.DEEPEST + 1))
    assert parser.is_shallow(b'["' + b"[" * 1000 + b'\\"' + b"{" * 1000 + b'"]')  # brackets in a text are a text


def test_a_line_longer_than_any_record_is_not_parsed(monkeypatch):
    monkeypatch.setattr(parser, "LONGEST_RECORD", 100)
    assert bad(ranks.read_progress(b'{"kind": "note", "time": 1.0, "text": "' + b"x" * 100 + b'"}')).startswith(
        "it is longer"
    )


def test_numbers_that_json_does_not_have_are_what_they_were():
    line = contract.record_line({"kind": "step", "time": TIME, "step": 3, "loss": math.nan, "grad_norm": -math.inf})
    found = ranks.read_progress(line.encode())
    assert math.isnan(found.loss)
    assert -math.inf == found.grad_norm


def test_values_stand_in_the_order_of_the_line():
    line = b'{"kind": "step", "time": 1.0, "step": 3, "b": 1, "loss": 2, "a": 3}'
    assert ["b", "loss", "a"] == list(ranks.measured_values(ranks.read_progress(line)))


def test_half_of_a_surrogate_pair_can_be_printed_afterwards():
    found = ranks.read_progress(b'{"kind": "note", "time": 1.0, "text": "a\\ud800b"}')
    assert b"a?b" == found.text.encode()


def test_a_field_of_a_later_version_is_left_alone():
    assert ranks.Stopping(time=1.0, step=3) == ranks.read_progress(
        b'{"kind": "stopping", "time": 1, "step": 3, "why": 7}'
    )


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([["a", None, "b", 2, [[1, 4, 1, 2, 100]]]], "`sent` names rank 2 of 2"),
        ([["a", None, "b", 1, [[0, 2**53, 1, 2, 100]]]], f"`sent` names steps 0 to {2**53} by 1"),
        ([["a", None, "b", 1, [[1, 4, 0, 2, 100]]]], "`sent` names steps 1 to 4 by 0"),
        ([["a", None, "b", 1, [[1, 4, 1, 2]]]], "`sent.0.….0` is a list of 4, expected a list of 5"),
    ],
)
def test_a_ledger_names_ranks_that_there_are_and_no_more_steps_than_can_be_counted(rows, reason):
    line = json.dumps({**STRETCH, "sent": rows}).encode()
    assert reason == bad(telemetry.read_stretch(line, world_size=2))


def test_a_host_speaks_of_ranks_that_there_are_only():
    for frame in FRAMES[3:6]:
        assert isinstance(agents.parse_agent_frame(frame, ranks=[0]), BadRecord) or frame["kind"] == "looked"
        assert isinstance(agents.parse_agent_frame(frame), BadRecord)


@pytest.mark.parametrize("port", [0, -1, 65536, 1e3, "61000; true", True])
def test_a_host_holds_a_port_that_there_is(port):
    frame = {"kind": "ready", "version": 3, "time": TIME, "clock": 5.0, "done": 0, "ports": [61000, port]}
    answer = agents.parse_agent_frame(frame, ranks=[0])
    assert isinstance(answer, parser.BadRecord)
    assert "expected the number of a port" in answer.reason


def test_records_that_are_built_wrong_are_our_own_mistake():
    with pytest.raises(TypeError, match="Stopping lacks or does not know step, stop"):
        ranks.Stopping(time=1.0, stop=3)


def test_a_shim_that_imports_records_pays_for_no_library():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from ttlaunch.records import ranks; print(*sorted(sys.modules))"
    )
    package = str(Path(ttlaunch.__file__).parents[1])
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, package], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"dataclasses", "typing", "inspect", "pydantic"} & set(answer.stdout.split())


@pytest.mark.parametrize("module", sorted(Path(parser.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_records_can_be_read_by_python_3_9(module):
    assert ast.parse(module.read_text(), feature_version=(3, 9)).body  # a statement of a later version is a SyntaxError
