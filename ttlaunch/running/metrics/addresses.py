"""The address of a server to which a run's lines or metrics are sent: parsed once, without credentials, and asked with bounds.

An address appears in process lists, in the run's folder and in messages. So one that contains credentials is refused; they come
from environment variables, under the names that the server's own tools use.
"""

import base64
import contextlib
import http.client
import io
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl, urlsplit

from ttlaunch.diagnostics import listed, shown
from ttlaunch.errors import TtlaunchError
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.running.deadline import DeadlineReader
from ttlaunch.system_reason import system_reason

LOKI_PUSH = "/loki/api/v1/push"
_JOB = quick_pattern(r"[A-Za-z0-9_.:-]{1,100}\Z")
_HOST = quick_pattern(r"[A-Za-z0-9._:%-]{1,255}\Z")
_PATH = quick_pattern(r"[!-~]*\Z")
_SWITCH = {"on": True, "off": False}
_PORTS = {"http": 80, "https": 443}
_LARGEST_ANSWER = 4096
_WITHIN_S = 20.0
_LONGEST_WAIT = 4  # digits of `Retry-After` that are believed


@dataclass(frozen=True)
class HttpAddress:
    """Where a server listens.

    Attributes:
        scheme: `http` or `https`.
        path: The path of requests, which begins with `/`.
    """

    scheme: str
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True)
class LokiAddress:
    """Where Loki listens, and how a run's lines are labelled there.

    Attributes:
        at: The address to which lines are pushed.
        job: With what the label `job` begins.
        with_metadata: Whether rank, role, run and recipe are sent as structured metadata.
    """

    at: HttpAddress
    job: str = "ttlaunch"
    with_metadata: bool = True


class Answer(NamedTuple):
    """The answer of a server.

    Attributes:
        text: The beginning of its body.
        location: Where a redirect leads; else empty.
        retry_after_s: How long the server asks to wait; 0 if it does not.
    """

    status: int
    text: str
    location: str
    retry_after_s: float


class NoAnswerError(TtlaunchError):
    """A server could not be reached or gave no answer that can be used; the text says why, in a clause."""


def parse_http_address(text: str) -> tuple[HttpAddress, Mapping[str, str]] | str:
    """Read an address and the options after its `?`; return what is wrong with it, in a clause without its content."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        return "it is no address of the form http://HOST:PORT"
    if parts.username is not None or parts.password is not None:
        return "it contains credentials"
    if parts.scheme not in _PORTS:
        return "it does not begin with `http://` or `https://`"
    if not _HOST.match(host) or port == 0:
        return "it has no host" if not host else "its host or port cannot be used"
    if parts.fragment or not _PATH.match(parts.path):
        return "its path cannot be used"
    names = [name for name, _ in options]
    if len({*names}) < len(names):
        return "an option is given twice"
    return HttpAddress(parts.scheme, host, port or _PORTS[parts.scheme], parts.path), dict(options)


def parse_loki_address(text: str) -> LokiAddress | str:
    """Read `http://HOST:PORT[?job=NAME&metadata=off]`; return what is wrong with it, in a clause."""
    found = parse_http_address(text)
    if isinstance(found, str):
        return found
    at, options = found
    unknown = next((name for name in options if name not in {"job", "metadata"}), None)
    if unknown is not None:
        return f"{shown(unknown)!r} is no option of it: `job` and `metadata` are"
    job, metadata = options.get("job", "ttlaunch"), options.get("metadata", "on")
    if not is_job(job):
        return "`job` needs 1 to 100 letters, digits or `_.:-`"
    if metadata not in _SWITCH:
        return f"`metadata` is {listed(_SWITCH)}"
    path = at.path.rstrip("/")
    path = path if path.endswith(LOKI_PUSH) else f"{path}{LOKI_PUSH}"
    return LokiAddress(HttpAddress(at.scheme, at.host, at.port, path), job, _SWITCH[metadata])


def parse_otlp_address(text: str) -> HttpAddress | str:
    """Read `http://HOST:PORT[/PATH]`, to which `/v1/metrics` and `/v1/logs` are added; return what is wrong with it."""
    found = parse_http_address(text)
    if isinstance(found, str):
        return found
    at, options = found
    return "it has options, and none is known" if options else at


def is_job(text: str) -> bool:
    """Whether the label `job` can begin with a text."""
    return _JOB.match(text) is not None


def loki_headers(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that identify the user to Loki, from the variables of Loki's own command line, `logcli`."""
    headers = {}
    if variables.get("LOKI_USERNAME") or variables.get("LOKI_PASSWORD"):
        both = f"{variables.get('LOKI_USERNAME', '')}:{variables.get('LOKI_PASSWORD', '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(both.encode()).decode()}"
    if variables.get("LOKI_BEARER_TOKEN"):
        headers["Authorization"] = f"Bearer {variables['LOKI_BEARER_TOKEN']}"
    if variables.get("LOKI_ORG_ID"):
        headers["X-Scope-OrgID"] = variables["LOKI_ORG_ID"]
    return headers


def post(at: HttpAddress, body: bytes, *, headers: Mapping[str, str], within_s: float = _WITHIN_S) -> Answer:
    """Send a request on a connection of its own, and return the answer.

    The time holds for all of it but the look-up of the name, at most 4 KiB of the answer's body are read, and redirects are not
    followed.

    Raises:
        NoAnswerError: The server cannot be reached, takes too long, or does not speak HTTP.
    """
    deadline = time.monotonic() + within_s
    try:
        with contextlib.closing(_connect(at, within_s)) as connection:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(_request_head(at, len(body), headers) + body)
            return _answer(connection, deadline)
    except ssl.SSLCertVerificationError as error:
        raise NoAnswerError(f"the certificate of {at} is not trusted: {error.verify_message}") from error
    except TimeoutError as error:
        raise NoAnswerError(f"{at} does not answer within {within_s:.0f} s") from error
    except socket.gaierror as error:
        raise NoAnswerError(f"no host is known as {shown(at.host)}: {system_reason(error)}") from error
    except OSError as error:
        raise NoAnswerError(f"{at} cannot be reached: {system_reason(error)}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise NoAnswerError(f"{at} does not answer as a server of HTTP does: {shown(error)}") from error


def _connect(at: HttpAddress, within_s: float) -> socket.socket:
    connection = socket.create_connection((at.host, at.port), timeout=within_s)
    if at.scheme == "http":
        return connection
    try:
        return ssl.create_default_context().wrap_socket(connection, server_hostname=at.host)
    except BaseException:
        connection.close()
        raise


def _request_head(at: HttpAddress, length: int, headers: Mapping[str, str]) -> bytes:
    named = {
        "Host": str(at).partition("://")[2],
        "User-Agent": "ttlaunch",
        "Connection": "close",
        "Content-Length": str(length),
        **headers,
    }
    if any(not value.isprintable() for value in named.values()):
        raise NoAnswerError("a variable with credentials contains characters that no header can have")
    lines = [f"POST {at.path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1", "replace")


def _answer(connection: socket.socket, deadline: float) -> Answer:
    response = http.client.HTTPResponse(cast("Any", _Readable(connection, deadline)), method="POST")
    response.begin()
    text = response.read(_LARGEST_ANSWER).decode("utf-8", "replace")
    wait = response.headers.get("Retry-After", "")
    retry_after_s = float(wait) if wait.isascii() and wait.isdecimal() and len(wait) <= _LONGEST_WAIT else 0.0
    return Answer(
        response.status, shown(text.strip(), longest=200), response.headers.get("Location", ""), retry_after_s
    )


class _Readable:
    """What `http.client` needs of a connection, with one deadline for all that is received, of which the head is bounded."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._reader = DeadlineReader(connection, deadline)

    def makefile(self, *_: object) -> io.BufferedReader:
        return io.BufferedReader(self._reader)
