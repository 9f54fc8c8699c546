"""What `/metrics` shows, in the text format of Prometheus: counted by the door where clients feel it, else told by the head."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from ttlaunch.serving.wire import Accepted, Cancel, Done, Pause, Refused, Resume, Stats, Tokens

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Counts values up to each of some bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, meaning: str) -> Iterator[str]:
        yield from _head(name, "histogram", meaning)
        below = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self._sum:.9g}"
        yield f"{name}_count {below}"


class Meters:
    """Counters and times since the door's start."""

    def __init__(self) -> None:
        self._tokens = self._prompt_tokens = self._reused = self._cancelled = self._refused = 0
        self._first = Histogram(_FIRST_TOKEN_S)
        self._each = Histogram(_TOKEN_S)
        self._begun: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def see(self, message: Accepted | Refused | Tokens | Done, now: float) -> None:
        """Count an answer of the head that arrived now (seconds)."""
        number = message.stream
        match message:
            case Accepted():
                if number not in self._begun and number not in self._last:
                    self._begun[number] = now
                    self._prompt_tokens += len(message.prompt_tokens)
            case Tokens():
                self._tokens += len(message.ids)
                if (begun := self._begun.pop(number, None)) is not None:
                    self._first.add(now - begun)
                elif number in self._last and message.ids:
                    for _ in message.ids:
                        self._each.add((now - self._last[number]) / len(message.ids))
                self._last[number] = now
            case Refused() | Done():
                self._begun.pop(number, None)
                self._last.pop(number, None)
                self._refused += isinstance(message, Refused)
                self._reused += message.reused if isinstance(message, Done) else 0

    def see_order(self, order: Cancel | Pause | Resume) -> None:
        """Count what a client had the door tell the head."""
        self._cancelled += isinstance(order, Cancel)

    def render(self, stats: Stats | None, *, healthy: bool) -> str:
        """Return the whole page; without numbers of a head that has told none yet."""
        lines = [
            *_one("healthy", "gauge", "1 if a token passed every stage in the last seconds", value=int(healthy)),
            *_one("tokens_total", "counter", "Tokens generated", value=self._tokens),
            *_one("prompt_tokens_total", "counter", "Tokens of accepted prompts", value=self._prompt_tokens),
            *_one("reused_tokens_total", "counter", "Tokens of prompts found in the cache", value=self._reused),
            *_one("cancelled_total", "counter", "Streams whose client left or stopped them", value=self._cancelled),
            *_one("refused_total", "counter", "Streams that the head refused", value=self._refused),
            *self._first.lines(f"{_PREFIX}time_to_first_token_seconds", "From acceptance to the first token"),
            *self._each.lines(f"{_PREFIX}token_seconds", "Between tokens of a stream"),
            *(_of_head(stats) if stats else ()),
        ]
        return "\n".join(lines) + "\n"


_PREFIX = "ttlaunch_serve_"


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}."
    yield f"# TYPE {name} {kind}"


def _one(name: str, kind: str, meaning: str, *, value: float) -> Iterator[str]:
    yield from _head(_PREFIX + name, kind, meaning)
    yield f"{_PREFIX}{name} {value:.9g}"


def _of_head(stats: Stats) -> Iterator[str]:
    yield from _one("streams", "gauge", "Streams that have a place in the cache", value=stats.streams)
    yield from _one("waiting", "gauge", "Streams that wait for a place", value=stats.waiting)
    yield from _one("steps_total", "counter", "Steps computed", value=stats.steps)
    yield from _one("rows_total", "counter", "Rows computed in all steps", value=stats.rows)
    yield from _one("rows_per_step", "gauge", "Rows a step, on average", value=stats.rows / max(stats.steps, 1))
    yield from _head(_PREFIX + "kv_bytes", "gauge", "Bytes of the cache of keys and values")
    yield f'{_PREFIX}kv_bytes{{kind="used"}} {stats.kv_bytes_used}'
    yield f'{_PREFIX}kv_bytes{{kind="limit"}} {stats.kv_bytes_limit}'
    yield from _head(_PREFIX + "guesses_total", "counter", "Guessed tokens")
    yield f'{_PREFIX}guesses_total{{outcome="right"}} {stats.guesses_right}'
    yield f'{_PREFIX}guesses_total{{outcome="wrong"}} {stats.guesses_wrong}'
    yield from _head(_PREFIX + "stage_busy_seconds_total", "counter", "Seconds that a rank computed")
    for rank, seconds in enumerate(stats.busy_seconds):
        yield f'{_PREFIX}stage_busy_seconds_total{{rank="{rank}"}} {seconds:.9g}'
    yield from _head(_PREFIX + "sent_bytes_total", "counter", "Bytes that a rank sent to another")
    for edge in stats.sent_bytes:
        yield f'{_PREFIX}sent_bytes_total{{from="{edge.source}",to="{edge.target}"}} {edge.count}'
