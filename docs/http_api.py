"""The reference of what a serving run answers over HTTP, made from the routes and the bodies that the door reads."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from starlette.routing import Route

from ttlaunch.serving.checked import UnfitError
from ttlaunch.serving.door import answers, openai_bodies
from ttlaunch.serving.door.chat_api import ChatApi, ChatBody, ClearBody, Ports
from ttlaunch.serving.door.link import LONGEST_SILENCE_S, Link
from ttlaunch.serving.door.metrics import Meters
from ttlaunch.serving.door.openai_api import OpenAiApi
from ttlaunch.web.guard import LONGEST_BODY, LONGEST_BODY_S
from ttlaunch.web.server import LONGEST_HEADERS, LONGEST_HEADERS_S, LONGEST_STANDSTILL_S, MOST_CONNECTIONS
from ttlaunch.web.sessions import LONGEST_IDLE_S, MOST_SESSIONS

_MEANINGS = {
    "text": "the text to continue; one of `text` and `messages`",
    "messages": "the turns of a chat: objects with `role` and `content`",
    "prompt": "the text to continue, or its token ids",
    "model": "the model's name, as `/v1/models` has it; another one is 404",
    "max_tokens": "most tokens to generate; the text ends sooner where the context ends",
    "max_completion_tokens": "the same under OpenAI's newer name; it wins",
    "temperature": f"0: always the likeliest token; unless given, {answers.DEFAULT_TEMPERATURE}, and 1 for OpenAI's routes",
    "top_p": "only the likeliest tokens with this probability in all",
    "top_k": "only so many of the likeliest tokens; 0: all",
    "decoding_strategy": "`greedy` is a temperature of 0; `top_k` needs a `top_k`",
    "worker_rank": "only repeated in the answer: all ranks compute every answer",
    "session_id": "whose earlier turns are remembered; drawn unless given, and told in the last event",
    "use_memory": "`/chat`: whether the session's turns go before this one, and are remembered; the oldest give way to an answer of a quarter of the context",
    "use_hf_defaults": "taken and not read",
    "seed": "equal seeds give equal texts; drawn unless given, and told in the answer",
    "stop": "the text ends before one of these",
    "receipt": "whether the answer has a [receipt](../how-to/check-a-receipt.md)",
    "session_ids": "sessions to forget",
    "n": "how many texts; each is the same alone, by the seed and its index",
    "stream": "whether the answer comes as events",
    "stream_options": "`include_usage`: a last event with the number of tokens",
    "logprobs": "of each token, the logarithm of its probability; `/v1/completions`: with so many likeliest ones",
    "top_logprobs": "so many likeliest tokens beside each; needs `logprobs`",
}
_RULES = {
    "prompt": "a text, or a list of token ids",
    "stop": f"a text, or a list of at most {openai_bodies.MOST_STOPS} texts",
    "stream_options": "an object",
}
"""How the page names the values of a key that may have one of several kinds."""


def render_http_api() -> str:
    """Return the page."""
    link, meters = Link(Path("serve.sock"), meters=Meters()), Meters()
    routes = [
        *ChatApi(link, meters=meters, ports=Ports(api=8080, page=5050)).routes(),
        *OpenAiApi(link).routes(),
    ]
    bodies = (
        ("`POST /chat`, `POST /query`", ChatBody),
        ("`POST /memory/clear`", ClearBody),
        ("`POST /v1/chat/completions`", openai_bodies.ChatCompletionBody),
        ("`POST /v1/completions`", openai_bodies.CompletionBody),
    )
    parts = [_INTRO, "## Routes\n\n| route | answer |\n|---|---|\n" + "".join(map(_route, routes))]
    parts += [
        f"## The body of {name}\n\n| key | value | meaning |\n|---|---|---|\n{''.join(_keys(made))}"
        for name, made in bodies
    ]
    return "\n".join((*parts, _NOT_SERVED, _ERRORS, _LIMITS))


def _route(route: Route) -> str:
    method = "POST" if "POST" in (route.methods or ()) else "GET"
    first = (route.endpoint.__doc__ or "").partition("\n")[0]
    return f"| `{method} {route.path}` | {first} |\n"


def _keys(made: Any) -> Iterator[str]:
    checks = get_type_hints(made, include_extras=True)
    for one in dataclasses.fields(made):
        rule = _RULES.get(one.name) if made is not ChatBody else None
        needed = ", required" if one.default is dataclasses.MISSING else ""
        yield f"| `{one.name}` | {rule or _rule(checks[one.name].__metadata__[0])}{needed} | {_MEANINGS[one.name]} |\n"


def _rule(check: Any) -> str:
    """The rule of a check: what it says of something that fits no rule."""
    try:
        check(object())
    except UnfitError as unfit:
        return unfit.rule.removeprefix("expected ")
    raise AssertionError("a check that takes anything")


_INTRO = f"""\
# HTTP

What [`ttlaunch serve`](../how-to/serve-a-run.md) answers on `--api-port`. The port of the chat page has the same routes, and the page at `/`.

`/chat` is a stream of events: `data: {{"token": "…", "done": false}}` for each piece of text, then one with `"done": true`, the whole text as `full_text`, times,
`seed`, `tokens_sha256`, `finish_reason` and `session_id`. `/query` answers at once, with the text as `generated_text`. OpenAI's routes answer as its clients expect; `seed` is told
beside their own keys, and `system_fingerprint` is the same as long as weights, torch, class of processor and precision are. While ranks are started again,
streams have a comment, `: {{"error": …, "retry": true}}`, and go on afterwards.

`/health` is 200 only if a token has passed every rank in the last {LONGEST_SILENCE_S:g} s; otherwise it is 503 with `status` (`loading`, `degraded`, `disconnected`), `reason` and `since`.
"""
_NOT_SERVED = f"""\
## Not served

OpenAI's keys {", ".join(f"`{name}`" for name in sorted(openai_bodies.NOT_SERVED))} would change the answer. They are 400 with the key's name, unless their value changes nothing.
{", ".join(f"`{name}`" for name in sorted(openai_bodies.WITHOUT_EFFECT))} never change an answer and are not read. Any other key is an error, with the nearest known one.
"""
_ERRORS = """\
## Mistakes

A wrong value is 422 with `{"error": "…", "code": "…", "place": "messages[2].role"}`. OpenAI's routes say 400 and `{"error": {"message", "type", "param", "code"}}` instead.

| status | when |
|---|---|
| 400 | the prompt does not fit into the context; the body is not JSON |
| 401 | the key is missing or wrong |
| 403, 421 | a page of another site asks; `Host` is not a name of this server |
| 404, 405 | there is no such route, model or method |
| 408, 413, 415 | the body takes too long, is too long, is not `application/json` |
| 422 | a value breaks a rule, or a key is unknown |
| 429 | `--max-streams` texts are computed and `--max-waiting` wait; `Retry-After` says when to come again |
| 503 | no rank is there, with the reason; `Retry-After` as well |
"""
_LIMITS = f"""\
## Limits

| what | limit |
|---|---|
| body of a request | {LONGEST_BODY >> 20} MiB, within {LONGEST_BODY_S:g} s |
| headers of a request | {LONGEST_HEADERS >> 10} KiB, within {LONGEST_HEADERS_S:g} s |
| connections | {MOST_CONNECTIONS}; past them, the one that has waited longest without a request is closed |
| a client that reads nothing | its text is paused after some kilobytes, and its connection closed after {LONGEST_STANDSTILL_S:g} s |
| a client that leaves | nothing more is computed for it |
| sessions | {MOST_SESSIONS}, each forgotten after {LONGEST_IDLE_S / 3600:g} h without a turn; they are kept in memory only, and never listed |
"""
