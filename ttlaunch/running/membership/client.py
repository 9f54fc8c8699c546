"""Ask a run's coordinator: over TLS with the authority that an invitation names, or over the run's own Unix socket.

Every request has one deadline for all of its bytes, and answers are bounded. What the coordinator says is parsed once, into a record.
"""

import hashlib
import http.client
import io
import ipaddress
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from ttlaunch import contract
from ttlaunch.agent.claims import connect
from ttlaunch.diagnostics.suggest import shown
from ttlaunch.errors import TtlaunchError
from ttlaunch.records import coordinator as answers
from ttlaunch.records.parser import BadRecord, read
from ttlaunch.running.deadline import DeadlineReader
from ttlaunch.system_reason import system_reason

T = TypeVar("T")
ANSWER_S = 15.0
"""How long the coordinator may take for an answer, besides the time that a heartbeat asks it to wait."""
_IDLE_S = 10.0
"""A connection that nobody has used for longer is not used again: the coordinator closes it, though later than this."""
_TRIES = 3
_PAUSE_S = 0.5
_LARGEST_ANSWER = 4 * 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_FORM = "https://HOST:PORT#SHA256"
_OK = 200


@dataclass(frozen=True)
class InvitationUrl:
    """Where a run takes workers.

    Attributes:
        authority: The SHA-256 of the certificate of the run's authority, in hexadecimal digits.
    """

    host: str
    port: int
    authority: str

    @property
    def place(self) -> str:
        """The host and the port, as users write them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"https://{self.place}#{self.authority}"


def without_brackets(place: str) -> str:
    """Return how an IPv6 address and its port are written, as a clause, if they are given without brackets; else nothing."""
    host, _, port = place.rpartition(":")
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return ""
    return f"an IPv6 address stands in brackets: `[{address}]:{port}`" if port.isdecimal() else ""


def parse_invitation_url(text: str) -> InvitationUrl | str:
    """Read the address of an invitation; returns what is wrong with it, in one clause, if it is none."""
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        place = text.strip().removeprefix("https://").partition("#")[0].rstrip("/")
        return without_brackets(place) or f"it is no address of the form {_FORM}"
    if parts.scheme != "https":
        return "it does not begin with `https://`"
    if parts.username is not None or parts.password is not None or parts.query or parts.path not in {"", "/"}:
        return f"it is not of the form {_FORM}"
    if not host or port is None or port == 0:
        return "it has no host and port"
    if not _SHA256.match(parts.fragment.lower()):
        return "it does not end in `#` and the 64 digits by which the run's certificate is known"
    return InvitationUrl(host, port, parts.fragment.lower())


class Problem(StrEnum):
    """Why the coordinator gave no answer that can be used."""

    UNREACHABLE = "unreachable"  # no connection, or no answer in time
    STRANGER = "stranger"  # whoever answers cannot prove to be the run
    UNUSABLE = "unusable"  # what it answers is not what a coordinator does


class NoAnswerError(TtlaunchError):
    """The coordinator gave no answer that can be used; the text says why, in one clause."""

    def __init__(self, problem: Problem, text: str) -> None:
        super().__init__(text)
        self.problem = problem


class RefusedError(TtlaunchError):
    """The coordinator refused a request.

    Attributes:
        status: The status of HTTP.
        refusal: What it said.
    """

    def __init__(self, status: int, refusal: answers.Refusal) -> None:
        super().__init__(shown(refusal.error, longest=500))
        self.status = status
        self.refusal = refusal


class CoordinatorClient:
    """A connection to a run's coordinator, which is opened anew when it has broken; for one thread at a time."""

    def __init__(self, open_socket: Callable[[float], socket.socket], *, token: str | None = None) -> None:
        """Begin without a connection.

        Args:
            open_socket: Connects within so many seconds, or raises `OSError`.
            token: What is shown with every request.
        """
        self._open_socket = open_socket
        self._token = token
        self._connection: _Connection | None = None
        self._used = 0.0

    def ask(
        self,
        answer: type[T],
        method: str,
        target: str,
        *,
        body: Mapping[str, Any] | None = None,
        within_s: float = ANSWER_S,
    ) -> T:
        """Send a request, and return its answer as a record.

        Args:
            answer: The class of the record.
            method: The verb of HTTP.
            target: The path and the query.
            body: What is sent as JSON; None for no body.
            within_s: The time for all of it, also for connecting.

        Raises:
            NoAnswerError: There was no answer in time, or none that can be used.
            RefusedError: The coordinator refuses the request.
        """
        sent = None if body is None else json.dumps(body, allow_nan=False).encode()
        status, content = self._exchange(method, target, data=sent, deadline=time.monotonic() + within_s)
        if status != _OK:
            raise RefusedError(status, _usable(answers.Refusal, content, status))
        return _usable(answer, content, status)

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._connection is not None:
            self._connection.end()
            self._connection = None

    def _exchange(self, method: str, target: str, *, data: bytes | None, deadline: float) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            connection = self._connected(deadline)
            connection.take_until(deadline)
            connection.request(method, target, data, headers)
            found = connection.getresponse()
            content = found.read(_LARGEST_ANSWER + 1)
        except ssl.SSLCertVerificationError as error:
            self.close()
            text = f"its certificate is not the run's: {error.verify_message or error.reason}"
            raise NoAnswerError(Problem.STRANGER, text) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise NoAnswerError(Problem.UNREACHABLE, _reason(error)) from error
        if len(content) > _LARGEST_ANSWER:
            self.close()
            raise NoAnswerError(Problem.UNUSABLE, f"its answer is longer than {_LARGEST_ANSWER // 2**20} MiB")
        self._used = time.monotonic()
        if found.will_close:
            self.close()
        return found.status, content

    def _connected(self, deadline: float) -> "_Connection":
        if time.monotonic() - self._used > _IDLE_S:
            self.close()
        if self._connection is None:
            self._connection = _Connection(self._open(deadline))
        return self._connection

    def _open(self, deadline: float) -> socket.socket:
        """Connect, with further tries where the other end closes the connection before it is complete.

        A coordinator does that whose machine is so busy that it has not shaken hands in time.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                return self._open_socket(max(0.001, deadline - time.monotonic()))
            except (ConnectionResetError, ssl.SSLEOFError):
                if not tries_left or time.monotonic() + _PAUSE_S > deadline:
                    raise
            time.sleep(_PAUSE_S)
        raise AssertionError


def _usable(cls: type[T], content: bytes, status: int) -> T:
    record = read(cls, content)
    if isinstance(record, BadRecord):
        text = f"what it answers with status {status} is no answer of a coordinator: {record.reason}"
        raise NoAnswerError(Problem.UNUSABLE, text)
    return record


class _Connection(http.client.HTTPConnection):
    """HTTP over a socket that is open already, with a deadline for each exchange."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(contract.COORDINATOR_NAME)
        self._stream = _Stream(connected)
        self.sock = cast("Any", self._stream)
        self.auto_open = 0

    def take_until(self, deadline: float) -> None:
        self._stream.deadline = deadline

    def close(self) -> None:
        """Do nothing: `getresponse` calls this when the other end will close, before the answer is read."""

    def end(self) -> None:
        super().close()


class _Stream:
    """What `http.client` needs of a socket, with one deadline for all that is sent and received."""

    def __init__(self, connected: socket.socket) -> None:
        self._connected = connected
        self.deadline = 0.0

    def sendall(self, data: bytes) -> None:
        self._connected.settimeout(max(0.001, self.deadline - time.monotonic()))
        self._connected.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(DeadlineReader(self._connected, self.deadline))

    def close(self) -> None:
        self._connected.close()


def client_on_unix_socket(path: str) -> CoordinatorClient:
    """Return a client of the owner's socket; asking fails with `NoAnswerError` if nobody, or another user, listens there."""

    def open_socket(timeout_s: float) -> socket.socket:
        connected = connect(path)
        connected.settimeout(timeout_s)
        return connected

    return CoordinatorClient(open_socket)


def client_over_tls(url: InvitationUrl, authority: bytes, *, token: str) -> CoordinatorClient:
    """Return a client that shows a token only to whoever proves to be the run.

    Args:
        url: Where the coordinator is.
        authority: The certificate of the run's authority (DER), as `fetch_authority` returns it.
        token: The token.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies the chain and the name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority)
    return CoordinatorClient(_opens_tls(url, context), token=token)


def fetch_authority(url: InvitationUrl, *, within_s: float = ANSWER_S) -> bytes:
    """Return the certificate of the run's authority (DER), which is exactly the one that the invitation names.

    Nothing secret is sent: until this function has returned, anybody could be at the other end.

    Raises:
        NoAnswerError: Nobody answers, or it is another run.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # what it sends is compared with the invitation instead
    client = CoordinatorClient(_opens_tls(url, context))
    try:
        found = client.ask(answers.Authority, "GET", "/authority", within_s=within_s).authority
        # Only these very bytes are trusted: the text could have further certificates behind the one that is compared.
        der = ssl.PEM_cert_to_DER_cert(found)
    except RefusedError as error:
        raise NoAnswerError(Problem.UNUSABLE, f"it does not say which run it is: {error}") from error
    except ValueError as error:
        raise NoAnswerError(Problem.UNUSABLE, "what it sends is no certificate") from error
    finally:
        client.close()
    if hashlib.sha256(der).hexdigest() != url.authority:
        raise NoAnswerError(Problem.STRANGER, "the certificate there is not the one that the invitation names")
    return der


def _opens_tls(url: InvitationUrl, context: ssl.SSLContext) -> Callable[[float], socket.socket]:
    def open_socket(timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        plain = socket.create_connection((url.host, url.port), timeout_s)
        try:
            plain.settimeout(max(0.001, deadline - time.monotonic()))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return context.wrap_socket(plain, server_hostname=contract.COORDINATOR_NAME)
        except BaseException:
            plain.close()
            raise

    return open_socket


def _reason(error: Exception) -> str:
    """Say in one clause why there was no answer."""
    match error:
        case TimeoutError():
            return "it does not answer in time"
        case socket.gaierror():
            return "no address is known for its name"
        case ConnectionRefusedError():
            return "the connection is refused"
        case http.client.HTTPException() | ssl.SSLError() | ValueError():
            return "it does not speak the protocol of a coordinator, or has closed the connection"
    return system_reason(error) or "the connection broke"
