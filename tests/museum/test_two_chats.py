"""The bug museum's room of chats: two of them over one socket (bug 26, as it was found)."""

import asyncio

import pytest

from tests.serving.greeting import HELLO, SHA
from ttlaunch.serving import wire
from ttlaunch.serving.door.link import Link
from ttlaunch.serving.door.metrics import Meters

from .test_parts import exhibit

LENGTH = 20


async def answer(reader, writer):
    """A head that answers two questions at once, with a letter of each in turn."""

    def send(message):
        writer.write(wire.encode(message))

    send(HELLO)
    decoder = wire.Decoder(wire.TO_HEAD, sender="the door")
    asked = []
    while len(asked) < 2:
        found = decoder.feed(await reader.read(1 << 16))
        asked += [message for message in found if isinstance(message, wire.Ask)]
    for ask in asked:
        send(wire.Accepted(stream=ask.stream, seed=1, prompt_tokens=(1,), weights_sha256=SHA))
    for _ in range(LENGTH):
        for ask in asked:
            send(wire.Tokens(stream=ask.stream, ids=(1,), text=ask.text))
    for ask in asked:
        send(wire.Done(stream=ask.stream, reason="length", prompt_tokens=1, generated=LENGTH))
    await reader.read()  # until the door closes
    writer.close()


async def texts_of_two_chats(make_link, path):
    """What two chats have received that ask for `a` and `b` at the same time."""
    server = await asyncio.start_unix_server(answer, path)
    link = make_link(path, meters=Meters())
    running = asyncio.create_task(link.run())
    while link.hello is None:  # noqa: ASYNC110 - the door has no event for it: it answers 503 until then
        await asyncio.sleep(0.01)
    streams = [link.ask(wire.Ask(stream=1, text=letter, max_tokens=LENGTH, seed=1)) for letter in "ab"]
    texts = ["", ""]

    async def read(place):
        async for event in streams[place].events():
            texts[place] += getattr(event, "text", "")

    await asyncio.wait([asyncio.create_task(read(place)) for place in (0, 1)], timeout=10)
    running.cancel()
    await asyncio.wait([running])
    server.close()
    return texts


def test_two_chats_on_one_socket_stay_apart(tmp_path):
    assert ["a" * LENGTH, "b" * LENGTH] == asyncio.run(texts_of_two_chats(Link, tmp_path / "head.sock"))


def test_a_link_that_gives_tokens_to_who_asked_last_is_caught(tmp_path):
    """Bug 26: the first chat gets nothing, and the second one the tokens of both."""
    link = exhibit("bug_26_two_chats_on_one_socket").LINK
    texts = asyncio.run(texts_of_two_chats(link, tmp_path / "head.sock"))
    with pytest.raises(AssertionError):
        assert ["a" * LENGTH, "b" * LENGTH] == texts
    assert "a" in texts[1]
