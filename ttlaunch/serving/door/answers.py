"""What every route shares: bodies that are read once, mistakes with their place and a status, and streams of events."""

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ttlaunch.serving.checked import UnfitError, build
from ttlaunch.serving.door.link import Link, NotReadyError
from ttlaunch.serving.door.streams import Interrupted, Stream
from ttlaunch.serving.wire import Accepted, Ask, Hello, Refused, WireError
from ttlaunch.untrusted.child import UntrustedError

OPENAI: Final = "/v1/"
"""Where the paths of OpenAI's API begin; its clients expect mistakes in another form, and 400 where the others get 422."""
DEFAULT_MAX_TOKENS: Final = 256
DEFAULT_TEMPERATURE: Final = 0.8
DEFAULT_TOP_P: Final = 1.0

log = logging.getLogger("ttlaunch.serving.door")

_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

Made = TypeVar("Made")
Result = TypeVar("Result")

_OF_REFUSALS: Final = {
    "context_too_long": (400, "context_length_exceeded"),
    "too_many": (429, "too_many_streams"),
    "bad_text": (422, "bad_text"),
    "bad_request": (422, "bad_request"),
    "stopping": (503, "stopping"),
}


class AnswerError(Exception):
    """Why a request gets no answer: an HTTP status, a sentence, a stable code, and the key that it is about."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


class TooLongError(AnswerError):
    """The prompt does not fit into the model's context."""


def render_error(path: str, error: AnswerError) -> dict[str, Any]:
    """The JSON of a mistake, as the clients of this path expect it."""
    if not path.startswith(OPENAI):
        found: dict[str, Any] = {"error": error.message, "code": error.code, "done": True}
        return found | ({"place": error.param} if error.param else {})
    kind = "invalid_request_error" if error.status < 500 and error.status != 429 else "server_error"  # noqa: PLR2004
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a request with its mistake."""
    assert isinstance(error, AnswerError)  # noqa: S101 - the application asks this for no other
    path = request.url.path
    status = 400 if error.status == 422 and path.startswith(OPENAI) else error.status  # noqa: PLR2004
    headers = {"retry-after": "1"} if status in {429, 503} else None
    return JSONResponse(render_error(path, error), status, headers)


async def read_body(request: Request, made: type[Made]) -> Made:
    """Make the dataclass of a route of the request's body.

    Raises:
        AnswerError: If it is not JSON, no object, or a value breaks its rule.
    """
    try:
        values = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise AnswerError(400, "the body is not JSON", code="not_json") from None
    if type(values) is not dict:
        raise AnswerError(422, "expected an object", code="wrong_value")
    return check(made, values)


def check(made: type[Made], values: Mapping[str, Any]) -> Made:
    """Make a dataclass of what a client sent.

    Raises:
        AnswerError: For the first value that breaks its rule, with its place and, of an unknown key, the nearest known one.
    """
    try:
        return build(made, values)
    except UnfitError as unfit:
        hint = f"; {unfit.hint}" if unfit.hint else ""
        raise AnswerError(422, f"{unfit}{hint}", code="wrong_value", param=unfit.path or None) from None


def wrong(place: str, rule: str) -> AnswerError:
    """A value that breaks a rule which one field alone cannot state."""
    return AnswerError(422, f"`{place}`: {rule}", code="wrong_value", param=place)


def known(link: Link) -> Hello:
    """What the head said about itself.

    Raises:
        AnswerError: If there has been no head yet.
    """
    if link.hello is None:
        raise AnswerError(503, link.health().reason or "the model is not ready", code="not_ready")
    return link.hello


async def begin(link: Link, ask: Ask) -> tuple[Stream, Accepted]:
    """Ask, and wait until the head has accepted; a chat becomes a text by the model's own template, if it has one.

    Raises:
        TooLongError: If the prompt does not fit into the context.
        AnswerError: If the head refuses for another reason, or no head is there.
    """
    if ask.messages is not None and link.hello is not None and link.hello.chat_template is not None:
        try:
            ask = replace(ask, text=await link.templates.render(link.hello, ask.messages), messages=None)
        except UntrustedError as error:
            raise AnswerError(
                422, f"the model's chat template: {error}", code="bad_template", param="messages"
            ) from None
    try:
        stream = link.ask(ask)
    except NotReadyError as error:
        raise AnswerError(503, str(error), code="not_ready") from None
    except WireError:
        raise AnswerError(413, "the request is too long for a message to the model", code="body_too_long") from None
    try:
        async for event in stream.events():
            match event:
                case Accepted():
                    return stream, event
                case Refused(code=kind):
                    status, code = _OF_REFUSALS[kind]
                    numbers = "".join(f" ({name}: {value})" for name, value in event.numbers.items())
                    made = TooLongError if kind == "context_too_long" else AnswerError
                    raise made(status, event.message + numbers, code=code)
                case Interrupted():
                    continue
                case _:
                    raise AnswerError(503, getattr(event, "message", None) or "the stream ended", code="ended")
    except asyncio.CancelledError:
        stream.close()
        raise
    raise AssertionError("a stream ends with an event of its own")


def draw_seed() -> int:
    """Draw the seed of a request without one; it is told in the answer, and gives the same text again."""
    return secrets.randbits(53)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result], streams: list[Stream]) -> Result | None:
    """Do the work of a route that answers at once, and stop the streams that it added as soon as its client is gone.

    Returns:
        What the work returns, or `None` if there is nobody left to tell.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_leave(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()
        for stream in streams:
            stream.close()


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events of some streams, which are closed however the answer ends: read to its end, or left."""

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncIterator[str], streams: list[Stream]) -> None:
        super().__init__(lines, headers={"x-accel-buffering": "no"})
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for stream in self._streams:
                stream.close()


def event_of(values: Mapping[str, Any] | str) -> str:
    """One event, as its line."""
    text = values if isinstance(values, str) else _JSON.encode(values)
    return f"data: {text}\n\n"


def comment_of(interrupted: Interrupted) -> str:
    """A line that clients of events ignore, and people who read them do not: why nothing comes for a while."""
    reason = f"{interrupted.reason}, restarting" if interrupted.is_restarting else interrupted.reason
    told = json.dumps({"error": reason, "retry": interrupted.is_restarting})
    return f": {told}\n\n"


def fingerprint(hello: Hello) -> str:
    """What has to be the same for a seed to give the same text: OpenAI's `system_fingerprint`."""
    parts = f"{hello.weights_sha256}\n{hello.torch}\n{hello.cpu}\n{hello.precision}"
    return hashlib.sha256(parts.encode()).hexdigest()[:12]
