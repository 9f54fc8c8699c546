"""Serve HTTP from the standard library: over TLS on a network, or plain on a Unix socket for the user's own processes.

Every connection has a thread. Connections are bounded, each request has a deadline for all of its bytes, and where there are too many
connections, one of the address with the most is closed: a slow or hostile client costs the others nothing.
"""

import contextlib
import io
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self, cast

from ttlaunch.agent.claims import is_same_user
from ttlaunch.running.deadline import DeadlineReader
from ttlaunch.running.membership.answers import Answer, Request

LARGEST_BODY = 64 * 1024
READ_S = 5.0
"""How long a client may take for a whole request, or for taking an answer."""
_IDLE_S = 30.0  # between two requests of one connection
_MOST_CONNECTIONS = 128
_MOST_WAITING = 64


@dataclass(eq=False)
class _Connection:
    """An open connection; `is_answering` while its request is being answered, which takes up to 20 s for a heartbeat."""

    socket: socket.socket
    address: str
    is_answering: bool = False

    def close(self) -> None:
        """Wake the thread that reads it. `SSLSocket.shutdown` would also drop the state that this thread still uses."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


@dataclass
class HttpService:
    """Answers requests on one listening socket until it is closed.

    Attributes:
        listener: Listens already; this object closes it.
        answer: Answers one request; called by several threads at once.
        tls: The certificate of the service; None on a Unix socket, where the kernel says who calls.
    """

    listener: socket.socket
    answer: Callable[[Request], Answer]
    tls: ssl.SSLContext | None = None
    read_s: float = READ_S
    most_connections: int = _MOST_CONNECTIONS
    _open: list[_Connection] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def start(self) -> Self:
        """Accept connections in a thread of its own."""
        assert self.tls is not None or self.listener.family == socket.AF_UNIX, "a network needs TLS"  # noqa: S101
        self.listener.listen(_MOST_WAITING)
        threading.Thread(target=self._accept, name="coordinator", daemon=True).start()
        return self

    def close(self) -> None:
        """Accept no more connections, and close those that are open."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which closing alone would not
        self.listener.close()
        with self._lock:
            for connection in self._open:
                connection.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                accepted, address = self.listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # no descriptor is left: one of the open connections will give one back
                continue
            found = _Connection(accepted, str(address[0]) if address else "")
            self._make_room(found)
            threading.Thread(target=self._serve, args=(found,), name="coordinator-client", daemon=True).start()

    def _make_room(self, newest: _Connection) -> None:
        with self._lock:
            self._open.append(newest)
            if len(self._open) <= self.most_connections:
                return
            counts = Counter(one.address for one in self._open)
            crowd = [one for one in self._open if counts[one.address] == max(counts.values())]
            # The oldest that only holds its place; one that is being answered waits for the coordinator, not the other way round.
            victim = next((one for one in crowd if not one.is_answering), crowd[0])
            self._open.remove(victim)
            victim.close()

    def _serve(self, connection: _Connection) -> None:
        plain = connection.socket
        try:
            plain.settimeout(self.read_s)
            if self.tls is not None:
                connection.socket = self.tls.wrap_socket(plain, server_side=True)  # also handshakes, within the timeout
            elif not is_same_user(plain):
                return
            _Handler(connection, self)
        except (OSError, ValueError):  # a client that is gone, slow, or speaks no TLS
            return
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._open.remove(connection)
            with contextlib.suppress(OSError):
                connection.socket.close()


class _Handler(BaseHTTPRequestHandler):
    """Reads the requests of one connection and answers them."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # of what is no request; an answer to version 0.9 would have no headers

    def __init__(self, connection: _Connection, service: HttpService) -> None:
        self._connection = connection
        self._service = service
        super().__init__(connection.socket, (connection.address, 0), cast("Any", service))

    def setup(self) -> None:
        self.connection = self._connection.socket
        self._reader = DeadlineReader(self.connection)
        self.rfile = self._buffered = io.BufferedReader(self._reader)
        self.wfile = io.BytesIO()  # an answer is sent at once, see `_send`

    def handle(self) -> None:
        self.close_connection = True
        self._reader.deadline = time.monotonic() + self._service.read_s
        self.handle_one_request()
        while not self.close_connection:
            self._reader.deadline = time.monotonic() + _IDLE_S
            if not self._buffered.peek(1):
                return
            self._reader.deadline = time.monotonic() + self._service.read_s
            self.handle_one_request()

    def finish(self) -> None:
        self.rfile.close()

    def do_GET(self) -> None:
        body = self._read_body()
        if isinstance(body, Answer):
            self._send(body, closing=True)
            return
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        request = Request(
            self.command,
            self.path,
            body=body,
            token=token.strip() if scheme.lower() == "bearer" else None,
            is_owner=self._service.tls is None,
            now=time.monotonic(),
        )
        self._connection.is_answering = True
        try:
            found = self._service.answer(request)
        finally:
            self._connection.is_answering = False
        self._send(found, closing=found.status in (401, 403))

    do_POST = do_DELETE = do_GET  # noqa: N815 - the names that `BaseHTTPRequestHandler` looks for

    def _read_body(self) -> bytes | Answer:
        lengths = self.headers.get_all("Content-Length") or ["0"]
        if self.headers.get("Transfer-Encoding") or len(set(lengths)) > 1 or not lengths[0].isdecimal():
            return Answer(411, {"error": "a request has one `Content-Length`"})
        length = int(lengths[0][:20])
        if length > LARGEST_BODY:
            return Answer(413, {"error": f"a body has at most {LARGEST_BODY} bytes, not {length}"})
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("the client left")
        return body

    def _send(self, found: Answer, *, closing: bool) -> None:
        self.close_connection = self.close_connection or closing
        content = json.dumps(found.content, separators=(",", ":"), allow_nan=False).encode()
        self.send_response_only(found.status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **({"WWW-Authenticate": "Bearer"} if found.status == 401 else {}),  # noqa: PLR2004 - as the next two
            **({"Connection": "close"} if self.close_connection else {}),
            **found.headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        data = cast("io.BytesIO", self.wfile).getvalue()
        self.wfile = io.BytesIO()
        self.connection.settimeout(self._service.read_s)  # for all of the answer
        self.connection.sendall(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer what is no HTTP request in JSON too."""
        self.command = getattr(self, "command", None) or ""
        self._send(Answer(code, {"error": message or "this is no request"}), closing=True)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the parent names it
        """Log nothing: a token could be in a line."""


def listen_on_unix_socket(path: str) -> socket.socket:
    """Return a socket that will listen at a path, which only the user can open.

    Raises:
        OSError: The path exists or cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        Path(path).chmod(0o600)
    except OSError:
        listener.close()
        raise
    return listener
