"""What stands before an application and lets only proper requests through: host, origin, key, body; and what browsers are told.

The rules, in their order: `Host` is one of the allowed names; a browser's request that changes something comes from a page of this
very server (no CORS header is ever sent); the key is right; the body is JSON and short, and arrives in time. The application gets
the whole body at once.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LONGEST_BODY: Final = 1 << 20
LONGEST_BODY_S: Final = 30.0
"""How long a body may take to arrive."""

POLICY: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""The Content-Security-Policy of answers that bring none of their own: they are data, which may load nothing."""

_LENGTH = re.compile(r"[0-9]{1,12}")
_SAFE = frozenset({"GET", "HEAD"})
_FIXED = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a request was not let through."""

    status: int
    message: str
    code: str


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The hosts, origins and keys with which a client may ask.

    Args:
        names: What `Host` may name, in lower case, without a port.
        key: What clients must send as `Authorization: Bearer KEY`, or `None` if anybody who reaches the server may ask.
        is_open: Whether a path can be read without the key, since it holds nothing of the run (a page's own files).
        render: Turns a refusal of a request for a path into the JSON of the answer.
    """

    names: frozenset[str]
    key: str | None
    is_open: Callable[[Scope], bool]
    render: Callable[[str, Refusal], dict[str, Any]]


class Guard:
    """The application behind these rules."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _FIXED.items():
                    headers[name] = value
                headers.setdefault("content-security-policy", POLICY)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        body = b""
        refusal = self._why_not(scope)
        if refusal is None and scope["method"] not in _SAFE:
            body_or_refusal = await _read_body(scope, receive)
            if isinstance(body_or_refusal, Refusal):
                refusal = body_or_refusal
            else:
                body = body_or_refusal
        if refusal is not None:
            await self._refuse(refusal, scope, send_with_headers)
            return
        first = [body]

        async def receive_whole() -> Message:
            if first and scope["method"] not in _SAFE:
                return {"type": "http.request", "body": first.pop(), "more_body": False}
            return await receive()

        await self._app(scope, receive_whole, send_with_headers)

    def _why_not(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        named = headers.getlist("host")
        if len(named) != 1 or _without_port(named[0]) not in self._rules.names:
            return Refusal(
                status=421, message=f"this server is not called {', '.join(named)[:200]!r}", code="wrong_host"
            )
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in _SAFE and origin != f"{scope['scheme']}://{named[0]}":
            return Refusal(status=403, message="pages of other sites may not ask this server", code="wrong_origin")
        if self._rules.key is None or self._rules.is_open(scope):
            return None
        kind, _, sent = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _equal(sent.strip(), self._rules.key):
            return None
        return Refusal(status=401, message="this server needs its key: `Authorization: Bearer KEY`", code="wrong_key")

    async def _refuse(self, refusal: Refusal, scope: Scope, send: Send) -> None:
        headers = {"connection": "close"}  # the rest of a body that nobody reads would be taken for the next request
        if refusal.status == 401:  # noqa: PLR2004 - the status that asks for a key
            headers["www-authenticate"] = "Bearer"
        answer = JSONResponse(self._rules.render(scope["path"], refusal), refusal.status, headers)
        await answer(scope, _nothing, send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _without_port(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()


def _equal(one: str, other: str) -> bool:
    """Compare texts in a time that tells nothing of where they differ, nor of how long they are."""
    return hmac.compare_digest(hashlib.sha256(one.encode()).digest(), hashlib.sha256(other.encode()).digest())


async def _read_body(scope: Scope, receive: Receive) -> bytes | Refusal:
    headers = Headers(scope=scope)
    too_long = Refusal(
        status=413, message=f"the body is longer than {LONGEST_BODY} bytes, the most that is read", code="body_too_long"
    )
    announced = headers.get("content-length", "0")
    if not _LENGTH.fullmatch(announced) or int(announced) > LONGEST_BODY:
        return too_long
    body = bytearray()
    try:
        async with asyncio.timeout(LONGEST_BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return Refusal(status=400, message="the body ended early", code="body_incomplete")
                body += message.get("body", b"")
                if len(body) > LONGEST_BODY:
                    return too_long
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        return Refusal(status=408, message=f"the body took more than {LONGEST_BODY_S:g} s", code="body_too_slow")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != "application/json":
        return Refusal(status=415, message="expected `Content-Type: application/json`", code="wrong_content_type")
    return bytes(body)
