"""The chat's own routes: `/chat`, `/query`, `/config`, `/health`, the memory of sessions, `/reconnect`."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ttlaunch.serving import receipt
from ttlaunch.serving.checked import MOST, decimal, list_of, object_of, one_of, or_none, string, truth, whole
from ttlaunch.serving.door import answers, metrics
from ttlaunch.serving.door.answers import EventStream, TooLongError, wrong
from ttlaunch.serving.door.link import Link
from ttlaunch.serving.door.metrics import Meters
from ttlaunch.serving.door.streams import Event, Interrupted, Stream
from ttlaunch.serving.wire import MOST_STOPS, MOST_TOKENS, Accepted, Ask, ChatMessage, Done, Hello, Tokens
from ttlaunch.web.sessions import Sessions, draw_id, is_id

_MOST_TURNS: Final = 200
_LONGEST_MEMORY: Final = 1 << 18
"""Most characters that a session remembers."""
_OF_CONTEXT: Final = 4
"""An answer has this part of the context at least, if it is asked for so many tokens: earlier turns give way to it."""


@dataclass(frozen=True, kw_only=True)
class ChatBody:
    """The body of `/chat` and `/query`."""

    text: Annotated[str | None, or_none(string())] = None
    messages: Annotated[tuple[ChatMessage, ...] | None, or_none(list_of(object_of(ChatMessage), 4096))] = None
    max_tokens: Annotated[int | None, or_none(whole(1, MOST_TOKENS))] = None
    temperature: Annotated[float | None, or_none(decimal(0.0, 100.0))] = None
    top_p: Annotated[float | None, or_none(decimal(0.0, 1.0))] = None
    top_k: Annotated[int | None, or_none(whole(0, 2**31 - 1))] = None
    decoding_strategy: Annotated[str | None, or_none(one_of("greedy", "sampling", "top_p", "top_k"))] = None
    worker_rank: Annotated[int | None, or_none(whole(0))] = None
    session_id: Annotated[str | None, or_none(string(128))] = None
    use_memory: Annotated[bool, truth] = True
    use_hf_defaults: Annotated[bool, truth] = False
    seed: Annotated[int | None, or_none(whole(0, MOST))] = None
    stop: Annotated[tuple[str, ...], list_of(string(200), MOST_STOPS)] = ()
    receipt: Annotated[bool, truth] = False

    def ask(self) -> Ask:
        """What to ask of the head, still without the session's turns.

        Raises:
            AnswerError: If the keys do not fit together.
        """
        if (self.text is None) == (self.messages is None):
            raise wrong("text", "expected exactly one of `text` and `messages`")
        if self.messages is not None and not self.messages:
            raise wrong("messages", "expected at least one message")
        if self.decoding_strategy == "top_k" and not self.top_k:
            raise wrong("top_k", "`decoding_strategy` is top_k, which needs a `top_k` of at least 1")
        greedy = self.decoding_strategy == "greedy"
        temperature = answers.DEFAULT_TEMPERATURE if self.temperature is None else self.temperature
        return Ask(
            stream=1,  # the link numbers it
            text=self.text,
            messages=self.messages,
            max_tokens=self.max_tokens or answers.DEFAULT_MAX_TOKENS,
            temperature=0.0 if greedy else temperature,
            top_p=answers.DEFAULT_TOP_P if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=answers.draw_seed() if self.seed is None else self.seed,
            stop=self.stop,
        )


@dataclass(frozen=True, kw_only=True)
class ClearBody:
    """The body of `/memory/clear`."""

    session_ids: Annotated[tuple[str, ...], list_of(string(128), 64)] = ()
    session_id: Annotated[str | None, or_none(string(128))] = None


@dataclass(kw_only=True)
class Memory:
    """The turns of a session, oldest first."""

    turns: list[ChatMessage] = field(default_factory=list)

    def remember(self, *turns: ChatMessage) -> None:
        """Add turns, and forget the oldest past the limits."""
        self.turns += turns
        while len(self.turns) > _MOST_TURNS or sum(len(one.content) for one in self.turns) > _LONGEST_MEMORY:
            del self.turns[0]


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Where this server listens, as `/config` says it; no page without a port."""

    api: int
    page: int | None


class Reading:
    """One answer while it is read: its text, and the times in it."""

    def __init__(self, hello: Hello, begun: tuple[Stream, Accepted], *, asked: float) -> None:
        self.hello = hello
        self.stream, self.accepted = begun
        self.text = ""
        self.ids: list[int] = []
        self.done: Done | None = None
        self._asked = asked
        self._first: float | None = None

    def see(self, event: Event) -> None:
        """Take one event of the stream."""
        if isinstance(event, Tokens):
            self._first = self._first or time.monotonic()
            self.text += event.text
            self.ids += event.ids
        elif isinstance(event, Done):
            self.done = event

    def figures(self, worker_rank: int | None) -> dict[str, Any]:
        """What both routes say at the end."""
        now = time.monotonic()
        total_s = now - self._asked
        first_s = (self._first or now) - self._asked
        return {
            "worker_rank": worker_rank or 0,
            "total_time_ms": round(total_s * 1000, 3),
            "time_to_first_token_ms": round(first_s * 1000, 3),
            "tokens_per_second": round(len(self.ids) / total_s, 3) if total_s > 0 else 0.0,
            "num_tokens": len(self.ids),
            "seed": self.accepted.seed,
            "tokens_sha256": receipt.hash_tokens(self.ids),
            "finish_reason": self.done.reason if self.done else "error",
        }

    def receipt(self, *, private: bool) -> dict[str, object]:
        """The receipt of this text."""
        reason = self.done.reason if self.done else "error"
        made = receipt.make_receipt(
            self.hello, self.stream.ask, self.accepted, tokens=self.ids, reason=reason, private=private
        )
        return receipt.receipt_values(made)


class ChatApi:
    """The routes, over one link to the head."""

    def __init__(self, link: Link, *, meters: Meters, ports: Ports, private_receipts: bool = False) -> None:
        self._link = link
        self._meters = meters
        self._ports = ports
        self._private = private_receipts
        self._sessions: Sessions[Memory] = Sessions(Memory, clock=time.monotonic)

    def routes(self) -> list[Route]:
        """Every route but `/`, which depends on the port."""
        return [
            Route("/health", self.health),
            Route("/config", self.config),
            Route("/metrics", self.metrics),
            Route("/chat", self.chat, methods=["POST"]),
            Route("/query", self.query, methods=["POST"]),
            Route("/memory/status", self.memory_status),
            Route("/memory/history", self.memory_history),
            Route("/memory/clear", self.memory_clear, methods=["POST"]),
            Route("/reconnect", self.reconnect, methods=["POST"]),
        ]

    async def health(self, _: Request) -> Response:
        """True only if a token has passed every stage in the last five seconds; never waits for the head."""
        health = self._link.health()
        if health.healthy:
            return JSONResponse({"status": health.status, "healthy": True})
        since = datetime.fromtimestamp(health.since, UTC).isoformat(timespec="seconds")
        told = {"status": health.status, "healthy": False, "reason": health.reason, "since": since}
        return JSONResponse(told, 503)

    async def config(self, _: Request) -> Response:
        """What is served, and how; no key and no path."""
        hello = answers.known(self._link)
        return JSONResponse(
            {
                "api_port": self._ports.api,
                "frontend_port": self._ports.page,
                "inference_backend": "model_parallelism",
                "inference_algorithm": hello.split,
                "inference_architecture": "model_parallelism",
                "model_name": hello.model,
                "available_worker_ranks": list(range(hello.ranks)),
                "memory_enabled": True,
                "memory_backend": "process",
                "max_new_tokens": answers.DEFAULT_MAX_TOKENS,
                "decoding_strategy": "sampling",
                "temperature": answers.DEFAULT_TEMPERATURE,
                "top_p": {"temperature": answers.DEFAULT_TEMPERATURE, "p": answers.DEFAULT_TOP_P},
                "recipe": hello.recipe,
                "step": hello.step,
                "context": hello.context,
                "precision": hello.precision,
                "weights_sha256": hello.weights_sha256,
                "torch": hello.torch,
                "cpu": hello.cpu,
                "split": hello.split,
                "exact": hello.exact,
                "why_not_exact": hello.why_not_exact,
                "max_streams": hello.max_streams,
                "max_waiting": hello.max_waiting,
            }
        )

    async def metrics(self, _: Request) -> Response:
        """Counters for Prometheus."""
        text = self._meters.render(self._link.stats, healthy=self._link.health().healthy)
        return PlainTextResponse(text, media_type=metrics.CONTENT_TYPE)

    async def chat(self, request: Request) -> Response:
        """Continue a chat, as events."""
        body = await answers.read_body(request, ChatBody)
        ask = body.ask()
        name = body.session_id or draw_id()
        if not is_id(name):
            raise wrong("session_id", "expected 1 to 128 letters, digits and `._:@-`")
        hello = answers.known(self._link)
        if body.worker_rank is not None and body.worker_rank >= hello.ranks:
            return EventStream(_only_error(_no_rank(body.worker_rank, hello)), [])
        memory = self._sessions.open(name) if body.use_memory else Memory()
        asked = time.monotonic()
        begun, forgotten = await self._begin(ask, memory)
        reading = Reading(hello, begun, asked=asked)
        return EventStream(self._events(body, name, memory=memory, reading=reading, forgotten=forgotten), [begun[0]])

    async def _begin(self, ask: Ask, memory: Memory) -> tuple[tuple[Stream, Accepted], int]:
        """Ask with the session's turns; where they leave no room for an answer, forget the oldest pairs, one after the other."""
        forgotten = 0
        while True:
            now = ask.messages or (ChatMessage(role="user", content=ask.text or ""),)
            is_chat = memory.turns or answers.known(self._link).chat_template is not None
            whole_chat = replace(ask, text=None, messages=(*memory.turns, *now)) if is_chat else ask
            try:
                begun = await answers.begin(self._link, whole_chat)
            except TooLongError:
                if not memory.turns:
                    raise
            else:
                context = answers.known(self._link).context
                room = context - len(begun[1].prompt_tokens)
                if not memory.turns or room >= min(ask.max_tokens, context // _OF_CONTEXT):
                    return begun, forgotten
                begun[0].close()
            forgotten += len(memory.turns[:2])
            del memory.turns[:2]

    async def _events(
        self, body: ChatBody, name: str, *, memory: Memory, reading: Reading, forgotten: int
    ) -> AsyncIterator[str]:
        async for event in reading.stream.events():
            reading.see(event)
            if isinstance(event, Interrupted):
                yield answers.comment_of(event)
            elif isinstance(event, Tokens) and event.text:
                yield answers.event_of({"token": event.text, "done": False})
        done = reading.done
        if done is None or done.reason == "error":
            reason = (done.message if done else None) or "the stream ended"
            yield answers.event_of({"error": reason, "done": True, "finish_reason": "error"})
            return
        now = body.messages or (ChatMessage(role="user", content=body.text or ""),)
        memory.remember(*now, ChatMessage(role="assistant", content=reading.text))
        last: dict[str, Any] = {"done": True, "full_text": reading.text, **reading.figures(body.worker_rank)}
        if body.use_memory:
            last |= {"session_id": name, "forgotten_turns": forgotten}
        if body.receipt:
            last["receipt"] = reading.receipt(private=self._private)
        yield answers.event_of(last)

    async def query(self, request: Request) -> Response:
        """Continue a text, as one answer; no session is read or written."""
        body = await answers.read_body(request, ChatBody)
        ask = body.ask()
        hello = answers.known(self._link)
        if body.worker_rank is not None and body.worker_rank >= hello.ranks:
            return JSONResponse(
                {"generated_text": "", "success": False, "error": _no_rank(body.worker_rank, hello)}, 422
            )
        streams: list[Stream] = []
        asked = time.monotonic()

        async def work() -> Reading:
            begun = await answers.begin(self._link, ask)
            streams.append(begun[0])
            reading = Reading(hello, begun, asked=asked)
            async for event in begun[0].events():
                reading.see(event)
            return reading

        reading = await answers.unless_gone(request, work(), streams)
        if reading is None:
            return Response(status_code=499)  # nobody reads it
        done = reading.done
        failed = done is None or done.reason == "error"
        error = ((done.message if done else None) or "the stream ended") if failed else None
        answer: dict[str, Any] = {"generated_text": reading.text, "success": not failed, "error": error}
        answer |= reading.figures(body.worker_rank)
        if body.receipt and not failed:
            answer["receipt"] = reading.receipt(private=self._private)
        return JSONResponse(answer, 503 if failed else 200)

    async def memory_status(self, _: Request) -> Response:
        """Whether sessions are remembered: always, in this process."""
        return JSONResponse({"enabled": True, "backend": "process", "error": None})

    async def memory_history(self, request: Request) -> Response:
        """The newest turns of a session; none of one that is not there."""
        name = request.query_params.get("session_id", "")
        if not is_id(name):
            raise wrong("session_id", "expected 1 to 128 letters, digits and `._:@-`")
        limit = request.query_params.get("limit", "100")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST_TURNS:
            raise wrong("limit", f"expected a whole number from 1 to {_MOST_TURNS}")
        memory = self._sessions.get(name)
        turns = memory.turns[-int(limit) :] if memory else []
        shown = [{"role": one.role, "content": one.content} for one in turns]
        return JSONResponse({"enabled": True, "session_id": name, "messages": shown})

    async def memory_clear(self, request: Request) -> Response:
        """Forget sessions."""
        body = await answers.read_body(request, ClearBody)
        names = (*body.session_ids, *((body.session_id,) if body.session_id is not None else ()))
        if not names:
            raise wrong("session_ids", "expected at least one session")
        return JSONResponse({"enabled": True, "cleared": [self._sessions.end(name) for name in names].count(True)})

    async def reconnect(self, _: Request) -> Response:
        """Make the connection to the head again; open streams go on."""
        if await self._link.reconnect():
            return JSONResponse({"status": "reconnected"})
        health = self._link.health()
        return JSONResponse({"status": health.status, "error": health.reason}, 503)


def _no_rank(rank: int, hello: Hello) -> str:
    return f"there is no rank {rank}: this run has ranks 0 to {hello.ranks - 1}, and all of them compute every answer"


async def _only_error(message: str) -> AsyncIterator[str]:
    yield answers.event_of({"error": message, "done": True})
