"""Whatever a host sends, the supervisor either understands it or names the host; it never breaks."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch import contract
from ttlaunch.agent.line import take_frame
from ttlaunch.records.agents import (
    AgentAlive,
    AgentEnded,
    AgentGone,
    AgentReady,
    AgentStopped,
    FilePiece,
    ProcessReport,
    RanksEnded,
    ShimLost,
    parse_agent_frame,
)
from ttlaunch.records.parser import BadRecord

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(
    [
        "version",
        "kind",
        "question",
        "stopped",
        "faults",
        "name",
        "offset",
        "whole",
        "number",
        "rank",
        "time",
        "clock",
        "done",
        "reason",
        "killed",
    ]
)
KINDS = st.sampled_from(
    [
        "file",
        "lost_shim",
        "ended",
        "looked",
        "alive",
        "ready",
        "gone",
        "refused",
        "stopped",
        "folder_gone",
        "ranks_ended",
    ]
)


@pytest.mark.parametrize(
    ("header", "meant"),
    [
        (
            {"kind": "file", "name": "logs/rank-3.stdout", "offset": 7, "whole": False, "number": 2},
            FilePiece(name="logs/rank-3.stdout", offset=7, whole=False, number=2),
        ),
        ({"kind": "lost_shim", "rank": 2, "time": 1.5}, ShimLost(rank=2, time=1.5)),
        ({"kind": "ended", "killed": 0}, AgentEnded(killed=0)),
        ({"kind": "ranks_ended", "status": 3, "said": "x"}, RanksEnded(status=3, said="x")),
        (
            {"kind": "ready", "time": 2, "clock": 1.5, "done": 3, "pid": 9, "sent": 4},
            AgentReady(version=0, time=2.0, clock=1.5, done=3, pid=9),
        ),
        ({"kind": "stopped", "pid": 9}, AgentStopped(pid=9)),
        ({"kind": "alive", "clock": 1.0, "done": 2}, AgentAlive(clock=1.0, done=2)),
        (
            {"kind": "looked", "question": 4, "stopped": [1], "faults": [[1, 7], [2, 0]]},
            ProcessReport(question=4, stopped=(1,), faults=((1, 7), (2, 0))),
        ),
        ({"kind": "gone", "reason": "no such file"}, AgentGone(reason="no such file")),
        ({"kind": "refused", "reason": "no word"}, AgentGone(reason="no word")),
    ],
)
def test_what_agents_say_is_understood(header, meant):
    assert parse_agent_frame(header, ranks=range(4)) == meant


@pytest.mark.parametrize(
    "name",
    [
        "logs/../../rank-0.stdout",
        "/etc/rank-0.stdout",
        "plan.json",
        "logs/rank-0.stdout/x",
        "checkpoints/step-1/rank-0.json",
    ],
)
def test_a_host_cannot_write_where_it_likes(name):
    found = parse_agent_frame({"kind": "file", "name": name, "offset": 0, "whole": True, "number": 1}, ranks=range(4))
    assert "no message of an agent" in found.reason


@given(
    st.dictionaries(NAMES, VALUES)
    | st.builds(lambda kind, rest: {**rest, "kind": kind}, KINDS, st.dictionaries(NAMES, VALUES))
)
def test_any_header_is_understood_or_refused(header):
    said = parse_agent_frame(header, ranks=range(4), last_step=100)
    if isinstance(said, BadRecord):
        assert said.reason.startswith("no message of an agent: ")
        return
    assert not isinstance(said, FilePiece) or min(said.offset, said.number) >= 0
    assert not isinstance(said, ShimLost) or math.isfinite(said.time)
    assert not isinstance(said, AgentAlive) or math.isfinite(said.clock)


@given(
    st.binary()
    | st.builds(
        lambda header, tail: contract.pack_frame(header) + tail, st.dictionaries(st.text(), VALUES), st.binary()
    )
)
def test_any_bytes_are_frames_or_refused(data):
    stream = io.BytesIO(data)
    try:
        while contract.read_frame(stream.read) is not None:
            pass
    except (ValueError, EOFError):
        return
    assert stream.read() == b""


@given(st.lists(st.tuples(st.dictionaries(st.text(), VALUES, max_size=2), st.binary()), max_size=4), st.integers(1, 50))
def test_frames_that_come_in_pieces_are_put_together(frames, size):
    data = b"".join(contract.pack_frame(*frame) for frame in frames)
    buffer, found = bytearray(), []
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        while (frame := take_frame(buffer)) is not None:
            found.append(frame)
    stream = io.BytesIO(data)
    assert repr([contract.read_frame(stream.read) for _ in frames]) == repr(found)  # NaN equals itself as text


def test_a_frame_that_is_larger_than_a_launcher_sends_is_refused_before_it_has_come():
    with pytest.raises(ValueError, match="not a frame"):
        take_frame(bytearray((2**24).to_bytes(4, "big") + bytes(2**21)))


def test_a_header_nested_without_end_is_no_frame():
    text = b"[" * 200_000
    stream = io.BytesIO(len(text).to_bytes(4, "big") + bytes(4) + text)
    with pytest.raises(ValueError, match="not a frame"):
        contract.read_frame(stream.read)
