"""The service between a serving engine and those who ask it, over real sockets."""

import socket
from contextlib import ExitStack

import pytest

from tests.serving.greeting import HELLO, SHA
from ttlaunch.runtime.serving.ask import Accepted, Done, Refused, Stats, Tokens
from ttlaunch.runtime.serving.asking import AskService
from ttlaunch.runtime.serving.text import make_tokenizer
from ttlaunch.serving import wire

CONTEXT = 200


class Echo:
    """An engine that repeats the last byte of each prompt, one for each step; it refuses an empty prompt, and what does not fit."""

    def __init__(self):
        self.live, self.steps, self.cancelled, self.paused = {}, 0, [], set()

    def submit(self, ask):
        if not ask.prompt:
            return Refused(ask.stream, "bad_setting", "nothing to continue", {"tokens": 0})
        if len(ask.prompt) + ask.max_tokens > CONTEXT:
            numbers = {"prompt": len(ask.prompt), "context": CONTEXT}
            return Refused(ask.stream, "context_too_long", "it does not fit", numbers)
        self.live[ask.stream] = [ask.prompt[-1], ask.max_tokens]
        return Accepted(ask.stream, 7, tuple(ask.prompt.encode()))

    def cancel(self, stream):
        self.cancelled.append(stream)
        self.live.pop(stream, None)

    def pause(self, stream):
        self.paused.add(stream)

    def resume(self, stream):
        self.paused.discard(stream)

    @property
    def is_idle(self):
        return not self.live.keys() - self.paused

    def step(self):
        self.steps += 1
        events = []
        for stream, state in list(self.live.items()):
            if stream in self.paused:
                continue
            events.append(Tokens(stream, (ord(state[0]),), state[0]))
            state[1] -= 1
            if not state[1]:
                del self.live[stream]
                events.append(Done(stream, "length", None, 1, 0, 1, 0))
        return events

    def stats(self):
        return Stats(streams=len(self.live), steps=self.steps)


class Asker:
    """A client that reads all that has come."""

    def __init__(self, path):
        self.socket = wire.connect(path)
        self.socket.settimeout(10)
        self.decoder = wire.Decoder(wire.FROM_HEAD, sender="the head")

    def send(self, *messages):
        self.socket.sendall(b"".join(map(wire.encode, messages)))

    def receive(self):
        self.socket.setblocking(False)  # noqa: FBT003 - the method takes no keyword
        received = b""
        try:
            while piece := self.socket.recv(1 << 16):
                received += piece
        except BlockingIOError:
            pass
        messages = list(self.decoder.feed(received))
        return [one for one in messages if not isinstance(one, wire.Stats)]


@pytest.fixture
def engine():
    return Echo()


@pytest.fixture
def beats():
    return []


@pytest.fixture
def place(tmp_path):
    return tmp_path / "serve.sock"


@pytest.fixture
def connect(place):
    with ExitStack() as stack:

        def connected():
            asker = Asker(place)
            stack.callback(asker.socket.close)
            return asker

        yield connected


@pytest.fixture
def service(engine, beats, place):
    tokenizer = make_tokenizer("byte", vocabulary=256)
    made = AskService(engine, wire.listen(place), hello=HELLO, tokenizer=tokenizer, beat=lambda: beats.append(1))
    yield made
    made.close()


def asked(stream, text, *, most=2, **settings):
    return wire.Ask(stream=stream, text=text, max_tokens=most, **settings)


def serve(service, times=6):
    for _ in range(times):
        service.serve(wait_s=0.0)


def test_two_sides_may_use_the_same_numbers_and_get_only_their_own_tokens(service, connect):
    one, other = connect(), connect()
    one.send(asked(1, "a"))
    other.send(asked(1, "b", most=1))
    serve(service)
    accepted, *rest = one.receive()[1:]
    assert wire.Accepted(stream=1, seed=7, prompt_tokens=(97,), weights_sha256=SHA) == accepted
    assert ["a", "a"] == [message.text for message in rest[:-1]]
    assert wire.Done(stream=1, reason="length", prompt_tokens=1, generated=1) == rest[-1]
    hello, _, tokens, _ = other.receive()
    assert (HELLO, "b") == (hello, tokens.text)


def test_a_side_that_leaves_costs_no_further_token(service, engine, connect):
    asker = connect()
    asker.send(asked(1, "a", most=100), asked(2, "b", most=100))
    serve(service, 3)
    asker.socket.close()
    serve(service, 2)
    steps = engine.steps
    serve(service, 3)
    assert [1, 2] == sorted(engine.cancelled)
    assert steps == engine.steps


def test_a_cancelled_stream_is_cancelled_and_a_foreign_number_is_nobody_s(service, engine, connect):
    one, other = connect(), connect()
    one.send(asked(5, "a", most=100))
    serve(service, 3)
    other.send(wire.Cancel(stream=5))
    serve(service, 2)
    assert [] == engine.cancelled
    one.send(wire.Cancel(stream=5))
    serve(service, 2)
    assert [1] == engine.cancelled


def test_a_paused_stream_gets_no_token_until_it_is_resumed(service, connect):
    asker = connect()
    asker.send(asked(1, "a", most=1), wire.Pause(stream=1))
    serve(service)
    assert [HELLO] == [one for one in asker.receive() if not isinstance(one, wire.Accepted)]
    asker.send(wire.Resume(stream=1))
    serve(service)
    assert ["Tokens", "Done"] == [type(one).__name__ for one in asker.receive()]


def test_a_refusal_has_the_words_and_numbers_of_the_engine(service, connect):
    asker = connect()
    asker.send(asked(1, ""))
    serve(service)
    refused = wire.Refused(stream=1, code="bad_request", message="nothing to continue", numbers={"tokens": 0})
    assert refused == asker.receive()[-1]


def test_a_text_for_which_the_context_has_too_little_room_ends_with_it(service, connect):
    asker = connect()
    asker.send(asked(1, "a" * 197, most=256), asked(2, "a" * 200, most=256))
    serve(service)
    told = [one for one in asker.receive() if not isinstance(one, wire.Hello)]
    assert 3 == sum(isinstance(one, wire.Tokens) for one in told)
    assert ["length"] == [one.reason for one in told if isinstance(one, wire.Done)]
    assert [2] == [one.stream for one in told if isinstance(one, wire.Refused)]


def test_a_pong_comes_after_a_message_through_all_ranks(service, beats, connect):
    asker = connect()
    serve(service, 1)
    before = len(beats)
    asker.send(asked(1, "a", most=100), wire.Ping(number=9))
    serve(service, 2)
    assert wire.Pong(number=9) in asker.receive()
    assert len(beats) > before


def test_a_side_that_sends_no_message_is_dropped_and_others_go_on(service, connect):
    bad, good = connect(), connect()
    bad.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    good.send(asked(1, "a", most=1))
    serve(service)
    assert "Done" == type(good.receive()[-1]).__name__
    bad.socket.settimeout(10)
    bad.receive()
    assert b"" == bad.socket.recv(1)


def test_a_head_that_ends_only_closes_its_connections_since_another_may_continue_the_streams(engine, place, connect):
    service = AskService(
        engine, wire.listen(place), hello=HELLO, tokenizer=make_tokenizer("byte", vocabulary=256), beat=lambda: None
    )
    asker = connect()
    asker.send(asked(3, "a", most=100))
    serve(service, 3)
    service.close()
    assert [] == [one for one in asker.receive() if isinstance(one, wire.Done)]
    asker.socket.settimeout(10)
    assert b"" == asker.socket.recv(1)


def test_messages_of_a_chat_are_joined_by_line_breaks(service, engine, connect):
    asker = connect()
    turns = (wire.ChatMessage(role="user", content="Hi"), wire.ChatMessage(role="assistant", content="Ho"))
    asker.send(wire.Ask(stream=1, messages=turns, max_tokens=1))
    serve(service)
    accepted = next(one for one in asker.receive() if isinstance(one, wire.Accepted))
    assert b"Hi\nHo\n" == bytes(accepted.prompt_tokens)


def test_the_socket_admits_only_this_user(service, place, connect):
    assert 0o600 == place.stat().st_mode & 0o777
    assert socket.AF_UNIX == connect().socket.family
