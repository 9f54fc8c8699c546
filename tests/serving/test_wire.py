"""The messages between the head of a serving run and what asks it."""

import contextlib
import json
import socket
import stat
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.greeting import HELLO, SHA
from ttlaunch.serving import wire

LIKELY = wire.Likely(id=7, text="h", logprob=-0.5)
FROM_HEAD = [
    HELLO,
    wire.Accepted(stream=1, seed=2**63 - 1, prompt_tokens=(1, 2), weights_sha256=SHA),
    wire.Refused(stream=2, code="context_too_long", message="129 tokens", numbers={"context": 128, "tokens": 129}),
    wire.Tokens(
        stream=1, ids=(7,), text="é\u2028", logprobs=(wire.TokenLogprob(id=7, text="h", logprob=-0.5, top=(LIKELY,)),)
    ),
    wire.Done(stream=1, reason="cancelled", prompt_tokens=2, generated=1, computed_after_cancel=1),
    wire.Pong(number=3),
    wire.Stats(
        streams=1,
        waiting=0,
        steps=9,
        rows=36,
        kv_bytes_used=1,
        kv_bytes_limit=2,
        busy_seconds=(0.5, 1.0),
        sent_bytes=(wire.SentBytes(source=0, target=1, count=4096),),
    ),
]
TO_HEAD = [
    wire.Ask(stream=1, text="é", max_tokens=5, seed=0, stop=("\n",), logprobs=0),
    wire.Ask(stream=2, messages=(wire.ChatMessage(role="user", content="hi"),), max_tokens=1, choice=7),
    wire.Ask(stream=3, tokens=(1, 2, 3), max_tokens=9, resumed=(4, 5), resumed_characters=2, temperature=0.0),
    wire.Cancel(stream=1),
    wire.Pause(stream=1),
    wire.Resume(stream=1),
    wire.Ping(number=1),
]


def frame(values):
    body = values if isinstance(values, bytes) else json.dumps(values).encode()
    return struct.pack(">I", len(body)) + body


def error_of(received, kinds=wire.TO_HEAD):
    with pytest.raises(wire.WireError) as caught:
        list(wire.Decoder(kinds, sender="the door").feed(received))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kinds", "messages"),
    [
        (wire.TO_HEAD, TO_HEAD),
        (wire.FROM_HEAD, FROM_HEAD),
        (wire.FROM_SUPERVISOR, [wire.RunState(state="failed", reason="r")]),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_messages_arrive_as_they_were_sent_however_the_bytes_are_cut(kinds, messages, piece):
    sent = b"".join(map(wire.encode, messages))
    decoder = wire.Decoder(kinds, sender="the door")
    arrived = [one for at in range(0, len(sent), piece) for one in decoder.feed(sent[at : at + piece])]
    decoder.finish()
    assert messages == arrived


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"kind": "hello"}, "the door sent a message of the unknown kind 'hello'"),
        ({"stream": 1}, "the door sent a message without a kind"),
        ([], "the door sent a message without a kind"),
        (b"{", "the door sent a message that is not JSON"),
        (b"\xff", "the door sent a message that is not JSON"),
        (b"[" * 100_000, "the door sent a message that is not JSON"),
        (b'{"kind":"ping","number":' + b"9" * 5000 + b"}", "the door sent a message that is not JSON"),
        ({"kind": "cancel"}, "the door sent a wrong `cancel`: `stream`: is missing"),
        ({"kind": "cancel", "stream": 1, "why": 1}, "the door sent a wrong `cancel`: `why`: is not a known key"),
        (
            {"kind": "cancel", "stream": True},
            f"the door sent a wrong `cancel`: `stream`: expected a whole number from 1 to {2**53}",
        ),
        (
            {"kind": "cancel", "stream": 0},
            f"the door sent a wrong `cancel`: `stream`: expected a whole number from 1 to {2**53}",
        ),
        (
            {"kind": "ask", "stream": 1, "max_tokens": 1},
            "the door sent a wrong `ask`: expected exactly one of text, messages and tokens",
        ),
        (
            {"kind": "ask", "stream": 1, "max_tokens": 1, "text": "a", "tokens": [1]},
            "the door sent a wrong `ask`: expected exactly one of text, messages and tokens",
        ),
        (
            {"kind": "ask", "stream": 1, "max_tokens": 1, "text": "\ud800"},
            "the door sent a wrong `ask`: `text`: expected a text without lone surrogates",
        ),
        (
            {"kind": "ask", "stream": 1, "max_tokens": 1, "text": "a", "temperature": float("nan")},
            "the door sent a wrong `ask`: `temperature`: expected a number from 0 to 100",
        ),
        (
            {"kind": "ask", "stream": 1, "max_tokens": 1, "messages": [{"role": "root", "content": ""}]},
            "the door sent a wrong `ask`: `messages[0].role`: expected one of system, user, assistant",
        ),
        (
            {"kind": "ask", "stream": 1, "max_tokens": 1, "text": "a", "stop": ["a"] * 5},
            "the door sent a wrong `ask`: `stop`: expected a list of at most 4 values",
        ),
    ],
    ids=lambda one: str(one)[:40],
)
def test_a_message_that_breaks_a_rule_is_refused_by_sender_field_and_rule(values, expected):
    assert expected == error_of(frame(values))


def test_a_length_beyond_the_bound_is_refused_before_its_bytes_arrive():
    assert "the door announced a message of 1048577 bytes; at most 1048576 may be sent" == error_of(
        struct.pack(">I", (1 << 20) + 1)
    )


def test_the_messages_before_a_broken_one_still_arrive():
    decoder = wire.Decoder(wire.TO_HEAD, sender="the door")
    arriving = decoder.feed(wire.encode(wire.Ping(number=1)) + frame(b"no"))
    assert wire.Ping(number=1) == next(arriving)
    with pytest.raises(wire.WireError):
        next(arriving)


def test_a_connection_that_ends_inside_a_message_is_no_clean_end():
    decoder = wire.Decoder(wire.FROM_HEAD, sender="the head")
    assert [] == list(decoder.feed(wire.encode(wire.Pong(number=1))[:-1]))
    with pytest.raises(wire.WireError, match="the head closed the connection inside a message"):
        decoder.finish()


def test_a_message_that_no_frame_can_hold_is_not_sent():
    with pytest.raises(wire.WireError, match="is too long: at most 1048576 can be sent"):
        wire.encode(wire.Ask(stream=1, text="a" * (1 << 20), max_tokens=1))


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_a_wire_error(body):
    for received in (body, frame(body)):
        with contextlib.suppress(wire.WireError):
            list(wire.Decoder(wire.FROM_HEAD, sender="the head").feed(received))


def test_a_socket_in_a_folder_with_a_long_name_is_reached_and_open_to_its_user_only(tmp_path):
    folder = tmp_path / ("a" * 120)
    folder.mkdir()
    path = folder / "serve.sock"
    with wire.listen(path) as listening, wire.connect(path) as door:
        head, _ = listening.accept()
        with head:
            head.sendall(wire.encode(HELLO))
            assert [HELLO] == list(wire.Decoder(wire.FROM_HEAD, sender="the head").feed(door.recv(1 << 16)))
        assert 0o600 == stat.S_IMODE(path.stat().st_mode)
        assert stat.S_ISSOCK(path.stat().st_mode)


def test_a_socket_that_is_there_already_is_not_replaced(tmp_path):
    with wire.listen(tmp_path / "serve.sock"), pytest.raises(OSError, match="in use"):
        wire.listen(tmp_path / "serve.sock")


def test_nobody_who_listens_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        wire.connect(tmp_path / "serve.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))
    with pytest.raises(ConnectionRefusedError):
        wire.connect(tmp_path / "left.sock")
