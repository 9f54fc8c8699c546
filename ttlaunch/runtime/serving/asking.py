"""Joins a serving engine to those who ask it over a Unix socket: parses what they send, and sends what the engine reports.

One thread does everything: it looks for messages between two steps of the engine, and sleeps on the socket while there is
nothing to compute. Each connection numbers its streams itself; here they get numbers of their own.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ttlaunch.runtime.serving import ask as serving
from ttlaunch.runtime.serving.answer_times import AnswerTimes
from ttlaunch.serving import wire

_PIECE = 65536
_MOST_UNSENT = 8 << 20
_STATS_S = 1.0
_PAUSED_S = 0.05
_NAMED = ("context_too_long", "too_many", "bad_text")
"""The engine's reasons for a refusal that have a name of their own on the wire."""


class AskedEngine(Protocol):
    """The part of a serving engine that is used here."""

    def submit(self, ask: serving.Ask) -> serving.Accepted | serving.Refused: ...

    def cancel(self, stream: int) -> None: ...

    def pause(self, stream: int) -> None: ...

    def resume(self, stream: int) -> None: ...

    @property
    def is_idle(self) -> bool: ...

    def step(self) -> list[serving.Event]: ...

    def stats(self) -> serving.Stats: ...


@dataclass(eq=False)
class _Asker:
    """One connection.

    Attributes:
        streams: The engine's number of each of its streams that has not ended.
        unsent: What the other side has not taken yet.
        awaits_room: Whether the selector tells when the other side takes more.
    """

    connection: socket.socket
    decoder: wire.Decoder = field(default_factory=lambda: wire.Decoder(wire.TO_HEAD, sender="the side that asks"))
    streams: dict[int, int] = field(default_factory=dict)
    unsent: bytearray = field(default_factory=bytearray)
    awaits_room: bool = False


class AskService:
    """Takes asks from connections, and sends answers. `serve` is called again and again; nothing here blocks but its wait.

    Attributes:
        times: How long answers take.
    """

    def __init__(
        self,
        engine: AskedEngine,
        listening: socket.socket,
        *,
        hello: wire.Hello,
        tokenizer: serving.Tokenizer,
        beat: Callable[[], None],
        stats: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Begin to listen.

        Args:
            engine: Answers the asks.
            listening: A socket that listens; it is closed by `close`.
            hello: The first message to everybody who connects.
            tokenizer: That of the engine, for the text beside probabilities.
            beat: Passes a message through all ranks of the model and back.
            stats: Further counters for `Stats`: seconds and bytes of all ranks.
        """
        self._engine, self._hello, self._tokenizer = engine, hello, tokenizer
        self._beat, self._more_stats = beat, stats
        self.times = AnswerTimes()
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._askers: set[_Asker] = set()
        self._unflushed: set[_Asker] = set()
        self._places: dict[int, tuple[_Asker, int]] = {}
        self._next_stream = 1
        self._pings: list[tuple[_Asker, int]] = []
        self._stats_at = 0.0
        self._was_asked = self._is_retiring = False
        listening.setblocking(False)  # noqa: FBT003 - the method takes no keyword
        self._selector.register(listening, selectors.EVENT_READ)

    @property
    def has_work(self) -> bool:
        """Whether a step may compute or report something."""
        return bool(self._places) or not self._engine.is_idle

    @property
    def is_left(self) -> bool:
        """Whether somebody has connected, and everybody has left again."""
        return self._was_asked and not self._askers

    @property
    def is_retired(self) -> bool:
        """Whether other weights are to be served, and no stream is open any more."""
        return self._is_retiring and not self._places

    def serve(self, *, wait_s: float) -> None:
        """Take what has arrived, let the engine do one step, and send what it reports.

        Args:
            wait_s: How long to sleep if nothing has arrived and there is nothing to compute.
        """
        was_idle = not self.has_work
        self._take(wait_s if was_idle else 0.0)
        if self.has_work:
            with self.times.working():
                events = self._engine.step()
                for event in events:
                    self._report(event)
            if not events and self._engine.is_idle:
                self._take(min(wait_s, _PAUSED_S))  # all streams are paused
        if self._pings or (was_idle and not self.has_work):
            self._beat()
            for asker, number in self._pings:
                self._send(asker, wire.Pong(number=number))
            self._pings.clear()
        self._send_stats()
        self._flush_all()

    def announce(self, hello: wire.Hello) -> None:
        """Say to all, and to those who connect later, that other weights are served."""
        self._hello = hello
        for asker in list(self._askers):
            self._send(asker, hello)
        self._flush_all()

    def close(self) -> None:
        """Close all connections; whoever asks on the other side knows, or learns from the supervisor, whether a head comes again."""
        for asker in list(self._askers):
            self._drop(asker)
        self._selector.close()
        self._listening.close()

    def _take(self, wait_s: float) -> None:
        for key, mask in self._selector.select(wait_s):
            if key.data is None:
                self._accept()
                continue
            asker: _Asker = key.data
            if mask & selectors.EVENT_WRITE and asker in self._askers:
                self._flush(asker)
            if mask & selectors.EVENT_READ and asker in self._askers:
                self._receive(asker)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            connection.setblocking(False)  # noqa: FBT003 - the method takes no keyword
            asker = _Asker(connection)
            self._askers.add(asker)
            self._was_asked = True
            self._selector.register(connection, selectors.EVENT_READ, asker)
            self._send(asker, self._hello)

    def _receive(self, asker: _Asker) -> None:
        try:
            piece = asker.connection.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._drop(asker)
            return
        try:
            for message in asker.decoder.feed(piece):
                self._do(asker, message)
        except wire.WireError:
            self._drop(asker)  # what follows a wrong message cannot be told apart

    def _do(self, asker: _Asker, message: wire.ToHead) -> None:
        if isinstance(message, wire.Ping):
            self._pings.append((asker, message.number))
        elif isinstance(message, wire.Ask):
            self._ask(asker, message)
        elif isinstance(message, wire.Retire):
            self._is_retiring = True
        elif (number := asker.streams.get(message.stream)) is not None:
            if isinstance(message, wire.Cancel):
                self._engine.cancel(number)
            elif isinstance(message, wire.Pause):
                self._engine.pause(number)
            else:
                self._engine.resume(number)

    def _ask(self, asker: _Asker, asked: wire.Ask) -> None:
        number, self._next_stream = self._next_stream, self._next_stream + 1
        answer = self._engine.submit(ask := _as_ask(asked, number))
        if isinstance(answer, serving.Refused) and 0 < (room := _room(answer)) < ask.max_tokens:
            answer = self._engine.submit(replace(ask, max_tokens=room))  # the context ends it, by `length`
        if isinstance(answer, serving.Refused):
            code = _on_the_wire(answer.code)
            numbers = {name: int(value) for name, value in answer.numbers.items()}
            self._send(asker, wire.Refused(stream=asked.stream, code=code, message=answer.message, numbers=numbers))
            return
        self.times.ask(number)
        asker.streams[asked.stream] = number
        self._places[number] = asker, asked.stream
        told = wire.Accepted(
            stream=asked.stream,
            seed=answer.seed,
            prompt_tokens=answer.prompt_tokens,
            weights_sha256=self._hello.weights_sha256,
        )
        self._send(asker, told)

    def _report(self, event: serving.Event) -> None:
        if event.stream not in self._places:
            return
        asker, stream = self._places[event.stream]
        if isinstance(event, serving.Tokens):
            self.times.add(event.stream, len(event.ids))
            logprobs = tuple(map(self._as_logprob, event.logprobs))
            self._send(asker, wire.Tokens(stream=stream, ids=event.ids, text=event.text, logprobs=logprobs))
            return
        del self._places[event.stream]
        self.times.end(event.stream)
        asker.streams.pop(stream, None)
        self._send(
            asker,
            wire.Done(
                stream=stream,
                reason=event.reason,
                message=event.message,
                prompt_tokens=event.prompt_tokens,
                reused=event.reused,
                generated=event.generated,
                computed_after_cancel=event.computed_after_cancel,
            ),
        )

    def _as_logprob(self, one: serving.Logprob) -> wire.TokenLogprob:
        top = tuple(
            wire.Likely(id=token, text=self._text(token), logprob=_bounded(value)) for token, value in one.likeliest
        )
        return wire.TokenLogprob(id=one.token, text=self._text(one.token), logprob=_bounded(one.logprob), top=top)

    def _text(self, token: int) -> str:
        return self._tokenizer.piece(token).decode(errors="replace")

    def _send(self, asker: _Asker, message: wire.FromHead) -> None:
        """Add a message to what an asker is sent at the end of the step, all at once: one call, and one wake-up of its reader."""
        if asker in self._askers:
            asker.unsent += wire.encode(message)
            self._unflushed.add(asker)

    def _flush_all(self) -> None:
        while self._unflushed:
            self._flush(self._unflushed.pop())

    def _flush(self, asker: _Asker) -> None:
        try:
            while asker.unsent:
                del asker.unsent[: asker.connection.send(asker.unsent)]
        except BlockingIOError:
            if len(asker.unsent) > _MOST_UNSENT:
                self._drop(asker)
                return
        except OSError:
            self._drop(asker)
            return
        if bool(asker.unsent) is not asker.awaits_room:
            asker.awaits_room = bool(asker.unsent)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if asker.unsent else 0)
            self._selector.modify(asker.connection, wanted, asker)

    def _drop(self, asker: _Asker) -> None:
        """Close a connection and cancel its streams: nobody waits for them any more."""
        if asker not in self._askers:
            return
        self._askers.discard(asker)
        self._unflushed.discard(asker)
        self._selector.unregister(asker.connection)
        asker.connection.close()
        for number in asker.streams.values():
            self._places.pop(number, None)
            self.times.end(number)
            self._engine.cancel(number)
        self._pings = [one for one in self._pings if one[0] is not asker]

    def facts(self) -> dict[str, int]:
        """Return numbers for the report: of the answers so far, and of the texts that are open and that wait for a place now."""
        counted = self._engine.stats()
        return {**self.times.facts(), "open_texts": counted.streams, "waiting_texts": counted.waiting}

    def _send_stats(self) -> None:
        now = time.monotonic()
        if now - self._stats_at < _STATS_S or not self._askers:
            return
        self._stats_at = now
        counted = self._engine.stats()
        told = wire.Stats(
            streams=counted.streams,
            waiting=counted.waiting,
            steps=counted.steps,
            rows=counted.rows,
            kv_bytes_used=counted.cache_bytes,
            kv_bytes_limit=counted.cache_limit,
            guesses_right=counted.guesses_right,
            guesses_wrong=counted.guesses_wrong,
        )
        told = replace(told, **self._more_stats())
        for asker in list(self._askers):
            self._send(asker, told)


def _as_ask(asked: wire.Ask, number: int) -> serving.Ask:
    prompt: str | tuple[int, ...] = asked.tokens if asked.tokens is not None else asked.text or ""
    if asked.messages is not None:
        prompt = plain_template(asked.messages)
    sampling = serving.Sampling(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k or None,
        seed=asked.seed,
        choice=asked.choice,
    )
    return serving.Ask(
        stream=number,
        prompt=prompt,
        max_tokens=asked.max_tokens,
        sampling=sampling,
        stops=asked.stop,
        logprobs=asked.logprobs,
        resumed=asked.resumed,
    )


def _room(refused: serving.Refused) -> int:
    """Return how many tokens fit into the context behind the prompt; 0 for a refusal that is not about that."""
    return int(refused.numbers.get("context", 0) - refused.numbers.get("prompt", 0))


TEMPLATE = "the contents of all messages, each followed by a line break"
"""The chat template of this project's own models, which have been trained on no chats."""


def plain_template(messages: tuple[wire.ChatMessage, ...]) -> str:
    """Return the text that a chat is for a model that was trained on none; see `TEMPLATE`."""
    return "".join(f"{message.content}\n" for message in messages)


def _on_the_wire(reason: str) -> str:
    return reason if reason in _NAMED else "bad_request"


def _bounded(value: float) -> float:
    return min(0.0, max(wire.LEAST_LOGPROB, value))
