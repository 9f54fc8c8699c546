"""Let this host connect to every other host of a cluster, and the others to it, on ports that the system chooses.

Frames to it: `reach` (connect to all peers at once), `measure` (latency and bandwidth to one), `end`. Frames from it:
`listening` (the port), `reached`, `measured`. Both sides prove that they know a token that only this cluster's scripts know, and
for which host they were started, so neither a stranger nor a second machine with the same address is taken for a peer. The token
itself is never sent.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import threading
import time

from ttlaunch import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_PROOF = 32
_SILENT_S = 2.0
_PAUSE_S = 0.05
_TRY, _MEASURE = b"t", b"m"
_LOAD = 64 * 1024  # many packets of any size, so that a way which loses large ones is noticed
_PINGS = 30
_CHUNK = 1024 * 1024
_SOME, _DONE = b"s", b"k"  # a part of the test load, or the rest of it, has arrived


def main(arguments: dict[str, Any]) -> int:
    """Serve until the frame `end`, or the end of standard input, beyond which it reads nothing: another script may follow.

    Args:
        arguments: `name` and `address` of this host, `token` (hexadecimal), `timeout_s` in which something has to come from a peer,
            `longest_s` for reaching all peers.
    """
    token = bytes.fromhex(arguments["token"])
    try:
        listener = socket.create_server((arguments["address"], 0), backlog=1024)
    except OSError as error:
        contract.send_frame({"kind": "listening", "port": None, "problem": _reason(error)})
        return 0
    threading.Thread(target=_serve, args=(listener, token, arguments["name"]), daemon=True).start()
    contract.send_frame({"kind": "listening", "port": listener.getsockname()[1], "problem": None})
    while True:
        frame = contract.read_frame(lambda size: os.read(0, size))
        if frame is None or frame[0]["kind"] == "end":
            return 0
        header = frame[0]
        if header["kind"] == "reach":
            limits = {name: arguments[name] for name in ("timeout_s", "longest_s")}
            results = _reach(header["peers"], token, **limits)
            contract.send_frame({"kind": "reached", "results": results})
        else:
            contract.send_frame({"kind": "measured", **_measure(header["peer"], token, seconds=header["seconds"])})


def _greeting(token: bytes, name: str) -> bytes:
    """What a host that knows the token sends to the host of this name."""
    return hmac.digest(token, b"to " + name.encode(), "sha256")


def _proof(token: bytes, name: str) -> bytes:
    """What the host of this name answers."""
    return hmac.digest(token, b"from " + name.encode(), "sha256")


class _Guest:
    """A connection that was accepted; the peer greets, then sends either a test load (try) or pings and data (measure)."""

    def __init__(self, connection: socket.socket, expected: bytes, proof: bytes) -> None:
        self._connection = connection
        self._expected = expected
        self._proof = proof
        self._came = time.monotonic()
        self._greeting = b""
        self._received = 0
        self._began = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether it has not greeted for so long that it is a stranger."""
        return len(self._greeting) <= _PROOF and time.monotonic() - self._came > _SILENT_S

    def receive(self, buffer: bytearray) -> bool:
        """Receive the data that have arrived; returns whether more are expected."""
        if len(self._greeting) <= _PROOF:
            part = self._connection.recv(_PROOF + 1 - len(self._greeting))
            self._greeting += part
            if len(self._greeting) > _PROOF:
                if not hmac.compare_digest(self._greeting[:_PROOF], self._expected):
                    return False
                self._connection.sendall(self._proof)
            return bool(part)
        size = self._connection.recv_into(buffer)
        if self._greeting.endswith(_TRY):
            self._received += size
            self._connection.sendall(_DONE if self._received == _LOAD else _SOME)
            return bool(size)
        return self._receive_measuring(size, buffer)

    def _receive_measuring(self, size: int, buffer: bytearray) -> bool:
        """Echo the pings and count the bytes after them; at the end send that count and the nanoseconds they took."""
        pings = min(size, max(0, _PINGS - self._received))
        if pings:
            self._connection.sendall(buffer[:pings])
        self._received += size
        if not size and self._began:
            took = int((time.monotonic() - self._began) * 1e9)
            self._connection.sendall((self._received - _PINGS).to_bytes(8, "big") + took.to_bytes(8, "big"))
        elif size > pings and not self._began:
            self._began = time.monotonic()
        return bool(size)


def _serve(listener: socket.socket, token: bytes, name: str) -> None:
    expected, proof, buffer = _greeting(token, name), _proof(token, name), bytearray(_CHUNK)
    looked = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(_SILENT_S):
                if key.fileobj is listener:
                    try:
                        connection, _ = listener.accept()
                    except OSError:
                        time.sleep(_PAUSE_S)  # there may be no descriptor left, and the next look would find the same
                        continue
                    with contextlib.suppress(OSError):
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.settimeout(1.0)
                    selector.register(connection, selectors.EVENT_READ, _Guest(connection, expected, proof))
                    continue
                goes_on = False
                with contextlib.suppress(OSError):
                    goes_on = key.data.receive(buffer)
                if not goes_on:
                    _send_away(selector, key)
            if time.monotonic() - looked > _SILENT_S:
                looked = time.monotonic()
                for key in [key for key in selector.get_map().values() if key.data is not None and key.data.is_silent]:
                    _send_away(selector, key)


def _send_away(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    selector.unregister(key.fileobj)
    key.fileobj.close()  # type: ignore[union-attr]


class _Attempt:
    """A test of one connection to a peer, in steps that never wait.

    The steps: connect, greet, check the peer's proof of identity, send a load, read that the load has arrived.

    Attributes:
        moved: When a part of the load was last said to have arrived, as `time.monotonic()`; at first, when the attempt began. A slow
            or busy way takes long for all of it, but one that loses large packets brings none.
    """

    def __init__(self, peer: Sequence[Any], token: bytes) -> None:
        name, address, port = peer
        self.name = name
        self.problem: str | None = "no answer"
        self.seconds: float | None = None
        self._greeting = _greeting(token, name)
        self._expected = _proof(token, name)
        self._received = b""
        self._load = memoryview(bytes(_LOAD))
        self.events = selectors.EVENT_WRITE
        self.connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.connection.settimeout(0.0)
        self._began = self.moved = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            self.connection.connect((address, port))

    def go_on(self, events: int) -> bool:
        """Take the steps that are possible now; returns whether more are to follow."""
        if self.seconds is None:
            error = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, "")
            self.seconds = time.monotonic() - self._began
            self.connection.send(self._greeting + _TRY)
            self.problem = "it connects, and then nothing comes"
            self.events = selectors.EVENT_READ
            return True
        if events & selectors.EVENT_WRITE and self._load:
            self._load = self._load[self.connection.send(self._load) :]
            self.events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._load else 0)
        return not events & selectors.EVENT_READ or self._receive()

    def _receive(self) -> bool:
        if len(self._received) < _PROOF:
            return self._receive_proof()
        answers = self.connection.recv(_LOAD)
        self.moved = time.monotonic()
        if answers.strip(_SOME) not in (b"", _DONE) or not answers:
            self.problem = "another machine answers at its address"
            return False
        if answers.endswith(_DONE):
            self.problem = None
            return False
        return True

    def _receive_proof(self) -> bool:
        part = self.connection.recv(_PROOF - len(self._received))
        self._received += part
        if not part or not self._expected.startswith(self._received):
            self.problem = "another machine answers at its address"
            return False
        if len(self._received) == _PROOF:
            self.problem = "large packets are lost"
            self.events = selectors.EVENT_READ | selectors.EVENT_WRITE
        return True


def _reach(peers: list[list[Any]], token: bytes, *, timeout_s: float, longest_s: float) -> list[list[Any]]:
    """Connect to all peers; for each return its name, the seconds until it accepted, and the problem, None if there is none."""
    results = []
    began = time.monotonic()
    end = began + timeout_s
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            try:
                attempt = _Attempt(peer, token)
            except OSError as error:
                results.append([peer[0], None, _reason(error)])
                continue
            selector.register(attempt.connection, attempt.events, attempt)
        while selector.get_map() and time.monotonic() < end:
            for key, events in selector.select(max(0.0, end - time.monotonic())):
                attempt = key.data
                try:
                    goes_on = attempt.go_on(events)
                except BlockingIOError:
                    goes_on = True
                except OSError as error:
                    attempt.problem, goes_on = _reason(error), False
                end = max(end, min(attempt.moved + timeout_s, began + longest_s))
                if goes_on:
                    selector.modify(attempt.connection, attempt.events, attempt)
                else:
                    selector.unregister(attempt.connection)
                    results.append(_close(attempt))
        results += [_close(key.data) for key in list(selector.get_map().values())]
    return results


def _close(attempt: _Attempt) -> list[Any]:
    attempt.connection.close()
    return [attempt.name, attempt.seconds, attempt.problem]


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno else str(error).lower()


def _measure(peer: list[Any], token: bytes, *, seconds: float) -> dict[str, Any]:
    """Measure the median round trip of one byte, and the bytes per second that the peer receives from this host."""
    name, address, port = peer
    try:
        with socket.create_connection((address, port), timeout=2.0 + seconds) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_greeting(token, name) + _MEASURE)
            if _take(connection, _PROOF) != _proof(token, name):
                return {"problem": "another machine answers at its address"}
            trips = []
            for _ in range(_PINGS):
                began = time.perf_counter()
                connection.sendall(b"p")
                _take(connection, 1)
                trips.append(time.perf_counter() - began)
            load = bytes(_CHUNK)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                connection.sendall(load)
            connection.shutdown(socket.SHUT_WR)
            answer = _take(connection, 16)
        count, nanoseconds = int.from_bytes(answer[:8], "big"), int.from_bytes(answer[8:], "big")
        import statistics  # noqa: PLC0415 - only measurements pay for it

        return {"latency_s": statistics.median(trips), "bytes_per_s": count * 1e9 / max(1, nanoseconds)}
    except OSError as error:
        return {"problem": _reason(error)}


def _take(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise OSError("it closed the connection")
        parts += part
    return parts
