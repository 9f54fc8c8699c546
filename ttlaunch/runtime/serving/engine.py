"""Generates many streams at once: takes asks, computes steps, draws tokens, reports events.

One object in one thread; it keeps no time and waits for nothing but the model. Whoever drives it calls `step` until
`is_idle`, and takes new asks, cancellations and pauses between two steps.
"""

import secrets
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ttlaunch.runtime.serving.ask import (
    MOST_LOGPROBS,
    Accepted,
    Ask,
    Done,
    Event,
    Limits,
    Logprob,
    Reason,
    RefusalCode,
    Refused,
    Sampling,
    Stats,
    Tokenizer,
    Tokens,
)
from ttlaunch.runtime.serving.sampling import draw, logprob_of
from ttlaunch.runtime.serving.scheduler import NO_SLOT, Scheduler, Stream, Work
from ttlaunch.runtime.serving.step_plan import Parts, Span
from ttlaunch.runtime.serving.text import TextPieces

_SEED_BITS = 48
"""Bits of a seed that the engine draws; JSON readers that take numbers for floats keep it exact."""


@dataclass
class _Live:
    """A stream of the engine."""

    ask: Ask
    stream: Stream
    prompt_tokens: int
    text: TextPieces
    generated: int = 0
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


class Engine:
    """Generates text for many streams with one model."""

    def __init__(self, parts: Parts, tokenizer: Tokenizer, limits: Limits, *, token_bytes: int = 0) -> None:
        """Begin without streams.

        Args:
            parts: The model, with a cache of `limits.max_streams` slots of at least `limits.context` tokens.
            tokenizer: Turns prompts into tokens, and tokens into text.
            limits: How much to take on.
            token_bytes: Bytes of one token in the cache over all parts, for `stats`.
        """
        self._parts, self._tokenizer, self._limits, self._token_bytes = parts, tokenizer, limits, token_bytes
        self._scheduler = Scheduler(limits, groups=parts.depth)
        self._live: dict[int, _Live] = {}
        self._cancelled: dict[int, _Live] = {}
        self._in_flight: deque[Work] = deque()
        self._events: list[Event] = []
        self._counts: Counter[str] = Counter()

    @property
    def is_idle(self) -> bool:
        """Whether `step` would have nothing to compute and nothing to report, until an ask or `resume` comes."""
        if self._events or self._in_flight:
            return False
        return all(live.stream.is_paused or live.stream.slot == NO_SLOT for live in self._live.values())

    def submit(self, ask: Ask) -> Accepted | Refused:
        """Take an ask, or refuse it with the reason; nothing is computed before the next step."""
        tokens = self._tokens_of(ask)
        if isinstance(tokens, Refused):
            return tokens
        refused = self._refusal(ask, tokens)
        if refused is not None:
            return refused
        seed = ask.sampling.seed
        seed = secrets.randbits(_SEED_BITS) if seed is None else seed
        ask = replace(ask, sampling=replace(ask.sampling, seed=seed))
        text = TextPieces(ask.stops)
        for token in ask.resumed:
            text.add(self._tokenizer.piece(token))
        stream = self._scheduler.add(ask.stream, [*tokens, *ask.resumed])
        live = _Live(ask, stream, len(tokens), text)
        self._live[ask.stream] = live
        self._count(prompt_tokens=len(tokens))
        is_ended = bool(ask.resumed) and ask.resumed[-1] in self._tokenizer.ends
        if is_ended or text.is_stopped or len(ask.resumed) >= ask.max_tokens:
            self._end(live, "stop" if is_ended or text.is_stopped else "length")
        return Accepted(ask.stream, seed, tuple(tokens))

    def cancel(self, number: int) -> None:
        """End a stream: its slot is free at once, and the next steps report `Done`. An unknown number is ignored."""
        live = self._live.pop(number, None)
        if live is None:
            return
        self._scheduler.remove(number)
        self._count(cancelled=1)
        if live.stream.in_flight:
            self._cancelled[number] = live
        else:
            self._events.append(_done(live, "cancelled"))

    def pause(self, number: int) -> None:
        """Compute nothing more for a stream until `resume`; it keeps its slot. An unknown number is ignored."""
        if number in self._live:
            self._live[number].stream.is_paused = True

    def resume(self, number: int) -> None:
        """Go on with a paused stream. An unknown number is ignored."""
        if number in self._live:
            self._live[number].stream.is_paused = False

    def step(self) -> list[Event]:
        """Compute one step, and report what is new: tokens and ends of streams, in the order of slots.

        While several steps may be on their way, this begins as many as there are streams for, and finishes the oldest.
        """
        while len(self._in_flight) < self._parts.depth and (work := self._scheduler.next_work()) is not None:
            self._parts.begin(work.plan, torch.tensor(work.tokens, dtype=torch.int64))
            self._in_flight.append(work)
        if self._in_flight:
            work = self._in_flight.popleft()
            self._take(work, self._parts.finish())
            self._count(steps=1, rows=work.plan.rows)
        events, self._events = self._events, []
        return events

    def stats(self) -> Stats:
        """Return what the engine has done, and what it has now."""
        streams = self._scheduler.live
        cached = sum(stream.computed for stream in streams)
        return replace(
            Stats(**self._counts),
            streams=len(streams),
            waiting=self._scheduler.waiting,
            cache_tokens=cached,
            cache_bytes=cached * self._token_bytes,
            cache_limit=self._limits.max_streams * self._limits.context * self._token_bytes,
        )

    def _tokens_of(self, ask: Ask) -> list[int] | Refused:
        if not isinstance(ask.prompt, str):
            return list(ask.prompt)
        try:
            return self._tokenizer.encode(ask.prompt)
        except ValueError as error:
            return Refused(ask.stream, "bad_text", str(error))

    def _refusal(self, ask: Ask, tokens: Sequence[int]) -> Refused | None:
        """The first rule that an ask breaks; None: it breaks none."""

        def refused(code: RefusalCode, message: str, **numbers: float) -> Refused:
            return Refused(ask.stream, code, message, numbers)

        if ask.stream in self._live or ask.stream in self._cancelled or ask.stream < 1:
            return refused(
                "stream_in_use", f"stream {ask.stream} is in use, or not a positive number", stream=ask.stream
            )
        if not tokens:
            return refused("bad_text", "the prompt is empty; it needs at least one token")
        vocabulary = self._tokenizer.vocabulary
        for token in (*tokens, *ask.resumed):
            if not 0 <= token < vocabulary:
                message = f"token {token} is outside the vocabulary of {vocabulary} tokens"
                return refused("bad_token", message, token=token, vocabulary=vocabulary)
        if (mistake := _mistake(ask)) is not None:
            return refused("bad_setting", mistake)
        total, context = len(tokens) + ask.max_tokens, self._limits.context
        if total > context or len(ask.resumed) > ask.max_tokens:
            message = f"{len(tokens)} tokens of the prompt + {ask.max_tokens} to generate = {total}, but the context is {context}"
            return refused("context_too_long", message, prompt=len(tokens), max_tokens=ask.max_tokens, context=context)
        if (
            self._scheduler.waiting >= self._limits.max_waiting
            and len(self._scheduler.live) == self._limits.max_streams
        ):
            waiting = self._scheduler.waiting
            message = f"{self._limits.max_streams} streams are computed and {waiting} wait; no more are accepted"
            return refused("too_many", message, streams=self._limits.max_streams, waiting=waiting)
        return None

    def _take(self, work: Work, logits: Tensor) -> None:
        start = 0
        for span, stream in zip(work.plan.spans, work.streams, strict=True):
            rows = logits[start : start + span.wanted]
            start += span.wanted
            live = self._live.get(stream.number)
            if live is None or live.stream is not stream:
                gone = self._cancelled.pop(stream.number)
                self._events.append(_done(gone, "cancelled", computed=span.count))
            else:
                guesses = work.tokens[start_of(work, span) + span.count - max(0, span.wanted - 1) :][: span.wanted - 1]
                self._advance(live, span, rows, guesses=guesses)

    def _advance(self, live: _Live, span: Span, logits_RV: Tensor, *, guesses: Sequence[int]) -> None:
        """Draw tokens until a guess is wrong or the stream ends."""
        drawn: list[int] = []
        reason: Reason | None = None
        is_finite = not bool(logits_RV.isnan().any())
        for place in range(span.wanted if is_finite else 0):
            token = self._draw(live, logits_RV[place], after=drawn)
            drawn.append(token)
            reason = self._add(live, token)
            if reason is not None or guesses[place : place + 1] != (token,):
                break
        self._scheduler.accept(live.stream, span, new=drawn)
        right = max(0, len(drawn) - 1)
        self._count(tokens=len(drawn), guesses_right=right, guesses_wrong=len(guesses) - right)
        if not is_finite:
            self._end(live, "error", message="the model's logits are not numbers")
        elif reason is not None:
            self._end(live, reason)
        else:
            self._report(live)

    def _draw(self, live: _Live, logits_V: Tensor, *, after: Sequence[int]) -> int:
        tokens, changed_V = [*live.stream.tokens, *after] if live.ask.processors else [], logits_V
        for processor in live.ask.processors:
            changed_V = processor(tokens, changed_V)
        position = len(live.stream.tokens) + len(after)
        token = draw(changed_V, live.ask.sampling, position=position)
        if live.ask.logprobs is not None:
            live.logprobs.append(logprob_of(logits_V, token, likeliest=live.ask.logprobs))
        return token

    def _add(self, live: _Live, token: int) -> Reason | None:
        """Take a token into what is reported next; return why the stream ends with it, if it does."""
        live.ids.append(token)
        live.generated += 1
        if token in self._tokenizer.ends:
            return "stop"
        live.pieces.append(live.text.add(self._tokenizer.piece(token)))
        if live.text.is_stopped:
            return "stop"
        return "length" if len(live.ask.resumed) + live.generated >= live.ask.max_tokens else None

    def _report(self, live: _Live) -> None:
        text = "".join(live.pieces)
        if live.ids or text:
            self._events.append(Tokens(live.ask.stream, tuple(live.ids), text, tuple(live.logprobs)))
        live.ids, live.pieces, live.logprobs = [], [], []

    def _end(self, live: _Live, reason: Reason, *, message: str | None = None) -> None:
        live.pieces.append(live.text.finish())
        self._report(live)
        self._events.append(_done(live, reason, message=message))
        self._count(reused_tokens=live.stream.reused)
        del self._live[live.ask.stream]
        self._scheduler.remove(live.ask.stream)

    def _count(self, **more: int) -> None:
        self._counts.update(more)


def start_of(work: Work, span: Span) -> int:
    """Return the first row of a span in its step."""
    return sum(other.count for other in work.plan.spans if other.slot < span.slot)


def _done(live: _Live, reason: Reason, *, message: str | None = None, computed: int = 0) -> Done:
    stream = live.stream
    return Done(live.ask.stream, reason, message, live.prompt_tokens, stream.reused, live.generated, computed)


def _mistake(ask: Ask) -> str | None:
    """What is wrong with an ask's settings; None: nothing."""
    sampling: Sampling = ask.sampling
    rules = (
        (0 <= sampling.temperature <= 100, f"temperature {sampling.temperature} is not from 0 to 100"),  # noqa: PLR2004
        (0 < sampling.top_p <= 1, f"top_p {sampling.top_p} is not above 0 and at most 1"),
        (sampling.top_k is None or sampling.top_k >= 1, f"top_k {sampling.top_k} is below 1"),
        (sampling.choice >= 0, f"choice {sampling.choice} is below 0"),
        (ask.max_tokens >= 1, f"max_tokens {ask.max_tokens} is below 1"),
        (
            ask.logprobs is None or 0 <= ask.logprobs <= MOST_LOGPROBS,
            f"logprobs {ask.logprobs} is not from 0 to {MOST_LOGPROBS}",
        ),
    )
    return next((message for is_right, message in rules if not is_right), None)
