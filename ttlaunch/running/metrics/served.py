"""How long a serving run took for its answers, and what each rank did meanwhile, from the numbers that its ranks report."""

from collections.abc import Sequence
from typing import Any

from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.metrics.telemetry import RankTelemetry

_HEAD = {"texts", "tokens", "working_us", "waiting_us"}
_EACH = {"computing_us", "sending_us"}


@dataclass(frozen=True)
class Latency:
    """The time of something in seconds: the median, and what nine times in ten it does not exceed."""

    median_s: float
    p90_s: float


@dataclass(frozen=True)
class RankWork:
    """What a rank did while there was a text to answer, in seconds.

    Attributes:
        computing: Layers of the model.
        messages: Sending, and receiving what was on its way or what all ranks exchange.
        waiting: Until other ranks had computed their parts.
        rest: At the head, drawing tokens and talking to who asks; None at any other rank, where it is part of `waiting`.
    """

    rank: int
    computing: float
    messages: float
    waiting: float
    rest: float | None

    def as_json(self) -> dict[str, Any]:
        named = {"computing": self.computing, "messages": self.messages, "waiting": self.waiting, "rest": self.rest}
        return {"rank": self.rank, **{f"{name}_s": value for name, value in named.items()}}


@dataclass(frozen=True)
class ServedWork:
    """The answers of a serving run.

    Attributes:
        texts: Texts that were begun.
        tokens: Tokens of all of them.
        working_s: Seconds in which there was at least one of them.
        first_token: From the arrival of an ask at the head to the text's first token; None before there was one.
        token: From one token of a text to the next; None before there was one.
        ranks: What each rank did in that time.
        open_texts, waiting_texts: Texts that were computed, and that waited for a place, when the head last wrote its numbers; None if an
            older version wrote them.
    """

    texts: int
    tokens: int
    working_s: float
    first_token: Latency | None
    token: Latency | None
    ranks: tuple[RankWork, ...]
    open_texts: int | None = None
    waiting_texts: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all texts per second in which there was one."""
        return self.tokens / self.working_s if self.working_s and self.tokens else None

    def as_json(self) -> dict[str, Any]:
        latencies = {"first_token": self.first_token, "token": self.token}
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "working_s": self.working_s,
            "tokens_per_s": self.tokens_per_s,
            "open_texts": self.open_texts,
            "waiting_texts": self.waiting_texts,
            **{name: None if one is None else vars(one) for name, one in latencies.items()},
            "ranks": [one.as_json() for one in self.ranks],
        }


def served_work(telemetry: Sequence[RankTelemetry]) -> ServedWork | None:
    """Return what a serving run did; None for another run, or if a rank has not reported it."""
    head = next((entry.facts for entry in telemetry if entry.facts.keys() >= _HEAD), None)
    if head is None or not all(entry.facts.keys() >= _EACH for entry in telemetry):
        return None
    working_s = head["working_us"] / 1e6
    ranks = []
    for entry in telemetry:
        computing, messages = entry.facts["computing_us"] / 1e6, entry.facts["sending_us"] / 1e6
        left = max(0.0, working_s - computing - messages)
        if entry.facts is head:
            waiting = head["waiting_us"] / 1e6
            ranks.append(RankWork(entry.rank, computing, messages, waiting, max(0.0, left - waiting)))
        else:
            ranks.append(RankWork(entry.rank, computing, messages, left, None))
    first, each = (_latency(head, name) for name in ("first_token", "token"))
    now = head.get("open_texts"), head.get("waiting_texts")
    return ServedWork(head["texts"], head["tokens"], working_s, first, each, tuple(ranks), *now)


def _latency(facts: dict[str, int], name: str) -> Latency | None:
    found = [facts.get(f"{name}_{part}_us") for part in ("median", "p90")]
    if None in found:
        return None
    median, p90 = (value / 1e6 for value in found if value is not None)
    return Latency(median, p90)
