"""The door's link to the head, where the head sends what is no message."""

import asyncio
import logging

from ttlaunch.serving.door.link import WARN_EVERY_S, Link
from ttlaunch.serving.door.metrics import Meters


def test_a_head_that_sends_nonsense_is_told_of_once_a_minute_however_often_its_connection_is_made_again(
    tmp_path, caplog
):
    now, connections = [0.0], asyncio.Queue()

    async def nonsense(_, writer):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await writer.drain()
        writer.close()
        connections.put_nowait(1)

    async def run():
        server = await asyncio.start_unix_server(nonsense, tmp_path / "serve.sock")
        link = Link(tmp_path / "serve.sock", meters=Meters(), clock=lambda: now[0])
        running = asyncio.create_task(link.run())
        async with server, asyncio.timeout(30):
            for _ in range(3):
                await connections.get()
            now[0] = WARN_EVERY_S
            for _ in range(2):
                await connections.get()
            running.cancel()
        assert "disconnected" == link.health().status

    with caplog.at_level(logging.WARNING, logger="ttlaunch.serving.door"):
        asyncio.run(run())
    first, second, *more = caplog.messages
    assert [] == more
    assert first.startswith("the head")
    assert second.removeprefix(first) in {
        "; 2 more times since the last such line",
        "; 1 more times since the last such line",
    }
