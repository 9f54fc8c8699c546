"""One stream as the door has it: what it tells the head about its reader, and what it asks after a restart."""

import asyncio

from ttlaunch.serving.door.streams import Stream
from ttlaunch.serving.wire import Accepted, Ask, Cancel, Done, Pause, Resume, Tokens

ASK = Ask(stream=4, text="a", max_tokens=100, seed=1)
ACCEPTED = Accepted(stream=4, seed=1, prompt_tokens=(97,), weights_sha256="ab" * 32)
DONE = Done(stream=4, reason="length", prompt_tokens=1, generated=3)


def tokens(text, *ids):
    return Tokens(stream=4, ids=ids, text=text)


def stream_with(*events):
    orders = []
    stream = Stream(ASK, orders.append)
    for event in events:
        stream.add(event)
    return stream, orders


def read(stream, count):
    async def some():
        return [await stream.next() for _ in range(count)]

    return asyncio.run(some())


def test_a_reader_that_falls_behind_pauses_its_stream_once_and_resumes_it_when_it_has_caught_up():
    stream, orders = stream_with(ACCEPTED, *[tokens("x" * 1000, 1)] * 20)
    assert [Pause(stream=4)] == orders
    read(stream, 10)
    assert [Pause(stream=4)] == orders
    read(stream, 11)
    assert [Pause(stream=4), Resume(stream=4)] == orders


def test_tokens_without_text_count_too():
    assert [Pause(stream=4)] == stream_with(ACCEPTED, *[tokens("", 1)] * 1000)[1]


def test_a_stream_is_asked_again_behind_what_it_has_produced_and_is_not_paused_then():
    stream, _ = stream_with(ACCEPTED, tokens("é", 1, 2), tokens("b" * 20_000, 3))
    again = stream.again()
    assert ((1, 2, 3), 20_001, 1) == (again.resumed, again.resumed_characters, again.seed)
    stream.add(ACCEPTED)
    assert [ACCEPTED, tokens("é", 1, 2), tokens("b" * 20_000, 3)] == read(stream, 3)


def test_closing_cancels_a_running_stream_once_and_an_ended_one_never():
    stream, orders = stream_with(ACCEPTED)
    stream.close()
    stream.close()
    assert [Cancel(stream=4)] == orders
    stream, orders = stream_with(ACCEPTED, DONE, tokens("late", 1))
    stream.close()
    assert [] == orders
    assert [ACCEPTED, DONE] == read(stream, 2)
