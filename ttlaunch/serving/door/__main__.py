"""Start the door: `python -m ttlaunch.serving.door --socket PATH`, as the supervisor of a serving run does.

Once it listens, it writes one line of JSON with its ports to stdout. On stdin it reads how the ranks are, and ends when stdin does.
"""

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from uvicorn import Server

from ttlaunch.serving import wire
from ttlaunch.serving.door.application import Settings, make_application
from ttlaunch.serving.door.chat_api import Ports
from ttlaunch.serving.door.link import Link
from ttlaunch.serving.door.metrics import Meters
from ttlaunch.serving.page import page_routes
from ttlaunch.system_reason import system_reason
from ttlaunch.web.addresses import KeyRefusedError, allowed_names, check_key, is_loopback, listen, read_key
from ttlaunch.web.server import make_server

_WRONG = 2
_KEY_VARIABLE = "TTLAUNCH_SERVE_KEY"


class _RefusedError(Exception):
    """Why the door does not open."""


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ttlaunch.serving.door", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="the head's socket")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--api-port", type=int, default=8080, help="port of the API; 0 for any")
    parser.add_argument("--port", type=int, default=5050, help="port of the chat page; 0 for any")
    parser.add_argument(
        "--listening",
        type=int,
        nargs=2,
        metavar="DESCRIPTOR",
        help="sockets of API and page that listen already, instead of the ports",
    )
    parser.add_argument("--key-file", type=Path, help=f"file (mode 0600) with the clients' key; else ${_KEY_VARIABLE}")
    parser.add_argument("--allow-host", action="append", default=[], help="a further name that `Host` may have")
    parser.add_argument("--private-receipts", action="store_true", help="receipts without the prompt's tokens")
    return parser.parse_args(given)


async def _open(arguments: argparse.Namespace) -> None:
    key = os.environ.get(_KEY_VARIABLE)
    if arguments.key_file:
        key = read_key(arguments.key_file)
    elif key is not None:
        check_key(key, f"${_KEY_VARIABLE}")
    if key is None and not is_loopback(arguments.host):
        raise _RefusedError(
            f"{arguments.host} can be reached by others, so that clients need a key: --key-file FILE or ${_KEY_VARIABLE}"
        )
    sockets = _sockets(arguments)
    api_port, page_port = (one.getsockname()[1] for one in sockets)
    meters = Meters()
    link = Link(arguments.socket, meters=meters)
    settings = Settings(
        ports=Ports(api=api_port, page=page_port),
        names=allowed_names(arguments.host, arguments.allow_host),
        key=key,
        private_receipts=arguments.private_receipts,
        page=page_routes(),
    )
    server = make_server(make_application(link, meters=meters, settings=settings), lifespan="off")
    linking = asyncio.create_task(link.run())
    listening = asyncio.create_task(_follow_supervisor(link, server))
    os.write(1, json.dumps({"api_port": api_port, "port": page_port}).encode() + b"\n")
    try:
        await server.serve(sockets=sockets)
    finally:
        linking.cancel()
        listening.cancel()


def _sockets(arguments: argparse.Namespace) -> list[socket.socket]:
    if arguments.listening:
        return [socket.socket(fileno=number) for number in arguments.listening]
    sockets = []
    for port in (arguments.api_port, arguments.port):
        try:
            sockets.append(listen(arguments.host, port))
        except OSError as error:
            raise _RefusedError(f"cannot listen on port {port} of {arguments.host}: {system_reason(error)}") from None
    return sockets


async def _follow_supervisor(link: Link, server: Server) -> None:
    """Learn how the ranks are; the end of stdin is the end of the supervisor, and of the door."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    decoder = wire.Decoder(wire.FROM_SUPERVISOR, sender="the supervisor")
    try:
        while received := await reader.read(1 << 16):
            for state in decoder.feed(received):
                link.take_run_state(state)
    finally:
        server.should_exit = True


def main(given: Sequence[str]) -> int:
    """Run the door until its supervisor or a signal ends it; the exit status."""
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    try:
        asyncio.run(_open(_arguments(given)))
    except (_RefusedError, KeyRefusedError) as refused:
        os.write(2, f"error: {refused}\n".encode())
        return _WRONG
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
