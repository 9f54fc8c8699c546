"""Whatever a host sends, the supervisor either understands it or names the host; it never breaks."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttlaunch import contract
from ttlaunch.launch.attendant_frames import AttendantEnded, FilePiece, Looked, ShimLost, parse_attendant_frame

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(["kind", "name", "offset", "whole", "rank", "time", "killed", "number", "stopped", "faults"])
KINDS = st.sampled_from(["file", "lost_shim", "ended", "looked", "alive", "refused"])


@pytest.mark.parametrize(
    ("header", "meant"),
    [
        (
            {"kind": "file", "name": "logs/rank-3.stdout", "offset": 7, "whole": False},
            FilePiece("logs/rank-3.stdout", 7, whole=False),
        ),
        ({"kind": "lost_shim", "rank": 2, "time": 1.5}, ShimLost(2, 1.5)),
        (
            {"kind": "looked", "number": 4, "stopped": [1], "faults": [[1, 7], [2, 0]]},
            Looked(4, frozenset({1}), {1: 7, 2: 0}),
        ),
        ({"kind": "ended", "killed": 0}, AttendantEnded(0)),
        ({"kind": "alive", "time": 1.0}, None),
    ],
)
def test_what_attendants_say_is_understood(header, meant):
    assert parse_attendant_frame(header) == meant


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
    with pytest.raises(ValueError, match="no message of an attendant"):
        parse_attendant_frame({"kind": "file", "name": name, "offset": 0, "whole": True})


@given(
    st.dictionaries(NAMES, VALUES)
    | st.builds(lambda kind, rest: {**rest, "kind": kind}, KINDS, st.dictionaries(NAMES, VALUES))
)
def test_any_header_is_understood_or_refused(header):
    try:
        said = parse_attendant_frame(header)
    except ValueError:
        return
    assert said is None or isinstance(said, FilePiece | ShimLost | Looked | AttendantEnded)
    assert not isinstance(said, FilePiece) or said.offset >= 0
    assert not isinstance(said, ShimLost) or math.isfinite(said.time)


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


def test_a_header_nested_without_end_is_no_frame():
    text = b"[" * 200_000
    stream = io.BytesIO(len(text).to_bytes(4, "big") + bytes(4) + text)
    with pytest.raises(ValueError, match="not a frame"):
        contract.read_frame(stream.read)
