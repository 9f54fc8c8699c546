"""OpenAI's routes, as its clients expect them: `/v1/models`, `/v1/completions`, `/v1/chat/completions`."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ttlaunch.serving.door import answers
from ttlaunch.serving.door.answers import AnswerError, EventStream
from ttlaunch.serving.door.link import Link
from ttlaunch.serving.door.openai_bodies import ChatCompletionBody, CompletionBody, read_served
from ttlaunch.serving.door.streams import Event, Interrupted, Stream
from ttlaunch.serving.wire import Accepted, Ask, Done, Hello, Likely, TokenLogprob, Tokens

_HALF_A_CHARACTER: Final = "\ufffd"


@dataclass(kw_only=True)
class Choice:
    """One of the texts of an answer, as far as it has arrived."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Done | None = None


class OpenAiApi:
    """The routes, over one link to the head."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
        ]

    async def models(self, _: Request) -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [_model(answers.known(self._link))]})

    async def model(self, request: Request) -> Response:
        """The model by its name."""
        hello = answers.known(self._link)
        _check_model(request.path_params["model"], hello)
        return JSONResponse(_model(hello))

    async def completions(self, request: Request) -> Response:
        """Continue a text."""
        return await self._answer(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a chat."""
        return await self._answer(request, ChatCompletionBody)

    async def _answer(self, request: Request, made: type[Any]) -> Response:
        values = await _read_object(request)
        body = read_served(made, values)
        asks: list[Ask] = body.asks()
        hello = answers.known(self._link)
        _check_model(body.model, hello)
        form = Form(hello, chat=made is ChatCompletionBody)
        streams: list[Stream] = []
        if body.stream:
            begun = await self._begin(asks, streams)
            form.seed = begun[0].seed
            return EventStream(_events(form, streams, begun=begun, usage=body.stream_options.include_usage), streams)
        answer = await answers.unless_gone(request, self._whole(form, asks, streams), streams)
        return JSONResponse(answer) if answer is not None else Response(status_code=499)  # nobody reads it

    async def _begin(self, asks: Sequence[Ask], streams: list[Stream]) -> list[Accepted]:
        """Begin the streams of all choices; none stays open if one is refused."""
        accepted = []
        try:
            for ask in asks:
                stream, answer = await answers.begin(self._link, ask)
                streams.append(stream)
                accepted.append(answer)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return accepted

    async def _whole(self, form: "Form", asks: Sequence[Ask], streams: list[Stream]) -> dict[str, Any]:
        begun = await self._begin(asks, streams)
        form.seed = begun[0].seed
        choices = [Choice() for _ in streams]
        for stream, choice in zip(streams, choices, strict=True):
            async for event in stream.events():
                if isinstance(event, Tokens):
                    choice.text += event.text
                    choice.logprobs += event.logprobs
                elif isinstance(event, Done):
                    choice.done = event
        for choice in choices:
            if choice.done is None or choice.done.reason == "error":
                message = (choice.done.message if choice.done else None) or "the stream ended"
                raise AnswerError(503, message, code="run_failed")
        return form.whole(choices, usage=_usage(begun, streams))


async def _read_object(request: Request) -> dict[str, Any]:
    try:
        values = json.loads(await request.body())
    except (ValueError, RecursionError):
        values = None
    if type(values) is not dict:
        raise AnswerError(400, "the body is not a JSON object", code="not_json")
    return values


def _model(hello: Hello) -> dict[str, Any]:
    return {"id": hello.model, "object": "model", "created": 0, "owned_by": "ttlaunch"}


def _check_model(name: str | None, hello: Hello) -> None:
    if name is not None and name != hello.model:
        raise AnswerError(404, f"the model served here is `{hello.model}`", code="model_not_found", param="model")


def _usage(begun: Sequence[Accepted], streams: Sequence[Stream]) -> dict[str, int]:
    """Count the prompt once, as OpenAI does, and the tokens of all choices."""
    prompt, generated = len(begun[0].prompt_tokens), sum(len(stream.ids) for stream in streams)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


async def _events(
    form: "Form", streams: Sequence[Stream], *, begun: Sequence[Accepted], usage: bool
) -> AsyncIterator[str]:
    """The events of all choices in the order in which they arrive, then `[DONE]`."""
    if form.chat:
        for place in range(len(streams)):
            yield answers.event_of(form.chunk(place, {"role": "assistant", "content": ""}))
    waiting = {asyncio.create_task(stream.next()): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            arrived, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(arrived, key=waiting.__getitem__):
                place, event = waiting.pop(task), task.result()
                if line := _line(form, place, event):
                    yield line
                if not isinstance(event, Done):
                    waiting[asyncio.create_task(streams[place].next())] = place
                elif event.reason == "error":
                    return
    finally:
        for task in waiting:
            task.cancel()
    if usage:
        yield answers.event_of(form.head(chunk=True) | {"choices": [], "usage": _usage(begun, streams)})
    yield answers.event_of("[DONE]")


def _line(form: "Form", place: int, event: Event) -> str:
    """What clients are sent of an event of a choice: nothing of tokens that have no text yet."""
    match event:
        case Interrupted():
            return answers.comment_of(event)
        case Tokens() if event.text or event.logprobs:
            return answers.event_of(form.part(place, event))
        case Done(reason="error"):
            error = AnswerError(503, event.message or "the stream ended", code="run_failed")
            return answers.event_of(answers.render_error(answers.OPENAI, error))
        case Done():
            return answers.event_of(form.last(place, event))
    return ""


class Form:
    """The JSON of one answer, for either route."""

    def __init__(self, hello: Hello, *, chat: bool) -> None:
        self.chat = chat
        self.seed = 0
        self._hello = hello
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """The keys that all parts of an answer share; `seed` is ours."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._hello.model,
            "system_fingerprint": answers.fingerprint(self._hello),
            "seed": self.seed,
        }

    def chunk(self, place: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        """One event of a chat."""
        choice = {"index": place, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return self.head(chunk=True) | {"choices": [choice]}

    def part(self, place: int, event: Tokens) -> dict[str, Any]:
        """The event with more text of a choice."""
        logprobs = self._logprobs(place, event.logprobs) if event.logprobs else None
        if self.chat:
            return self.chunk(place, {"content": event.text}, logprobs=logprobs)
        choice = {"index": place, "text": event.text, "logprobs": logprobs, "finish_reason": None}
        return self.head(chunk=True) | {"choices": [choice]}

    def last(self, place: int, done: Done) -> dict[str, Any]:
        """The event with the end of a choice."""
        if self.chat:
            return self.chunk(place, {}, finish_reason=_reason(done))
        choice = {"index": place, "text": "", "logprobs": None, "finish_reason": _reason(done)}
        return self.head(chunk=True) | {"choices": [choice]}

    def whole(self, choices: Sequence[Choice], *, usage: dict[str, int]) -> dict[str, Any]:
        """The answer without events."""
        made = []
        for place, choice in enumerate(choices):
            logprobs = self._logprobs(place, choice.logprobs) if choice.logprobs else None
            text = {"message": {"role": "assistant", "content": choice.text}} if self.chat else {"text": choice.text}
            made.append({"index": place, **text, "logprobs": logprobs, "finish_reason": _reason(choice.done)})
        return self.head(chunk=False) | {"choices": made, "usage": usage}

    def _logprobs(self, place: int, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self.chat:
            return {"content": [{**_likely(one), "top_logprobs": [_likely(top) for top in one.top]} for one in found]}
        offsets = []
        for one in found:
            offsets.append(self._offsets.get(place, 0))
            self._offsets[place] = offsets[-1] + len(one.text)
        return {
            "tokens": [one.text for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [{top.text: top.logprob for top in one.top} for one in found],
            "text_offset": offsets,
        }


def _reason(done: Done | None) -> str:
    return done.reason if done is not None and done.reason in {"stop", "length"} else "stop"


def _likely(one: Likely) -> dict[str, Any]:
    """A token with its bytes, unless it is half a character, whose bytes the text does not show."""
    known = None if _HALF_A_CHARACTER in one.text else list(one.text.encode())
    return {"token": one.text, "logprob": one.logprob, "bytes": known}
