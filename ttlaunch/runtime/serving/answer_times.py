"""How long the head of a serving run took for answers: to their first token, from token to token, and altogether. No torch."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LAST = 1024
"""How many times are kept at most: those of the last texts, and of the last tokens."""


class AnswerTimes:
    """Times of texts; each text is known by a number of the caller's. Memory: a few numbers for each open text."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without texts; `clock` returns seconds and never goes back."""
        self._clock = clock
        self._asked: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._first_tokens: deque[float] = deque(maxlen=_LAST)
        self._tokens: deque[float] = deque(maxlen=_LAST)
        self._texts = self._count = 0
        self._working_s = 0.0

    def ask(self, text: int) -> None:
        """Note that a text was asked for."""
        self._texts += 1
        self._asked[text] = self._clock()

    def add(self, text: int, tokens: int) -> None:
        """Note tokens of a text."""
        if not tokens:
            return
        now = self._clock()
        self._count += tokens
        if (asked := self._asked.pop(text, None)) is not None:
            self._first_tokens.append(now - asked)
        elif (last := self._last.get(text)) is not None:
            self._tokens.append((now - last) / tokens)
        self._last[text] = now

    def end(self, text: int) -> None:
        """Note that nothing follows of a text, known or not."""
        self._asked.pop(text, None)
        self._last.pop(text, None)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a block as time in which there was something to answer."""
        began = self._clock()
        yield
        self._working_s += self._clock() - began

    def facts(self) -> dict[str, int]:
        """Return numbers for the report, times in microseconds; a time of which nothing is known is left out.

        `first_token` is from the ask to the first token, `token` from one token of a text to the next: of the last texts and tokens, the
        median and what nine in ten do not exceed.
        """
        found = {"texts": self._texts, "tokens": self._count, "working_us": round(self._working_s * 1e6)}
        for name, times in (("first_token", self._first_tokens), ("token", self._tokens)):
            if ordered := sorted(times):
                found[f"{name}_median_us"] = round(ordered[(len(ordered) - 1) // 2] * 1e6)
                found[f"{name}_p90_us"] = round(ordered[-(-len(ordered) * 9 // 10) - 1] * 1e6)
        return found
