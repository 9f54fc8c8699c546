"""Choose the lines of the ranks that are shown, and fold equal lines that several ranks print at the same moment."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.logs.merged import Line, MergedLog

WINDOW_S = 0.15
"""How long a line waits for the same line of other ranks."""
_MOST_HELD = 2048


@dataclass
class _Group:
    line: Line
    ranks: list[int]
    until: float


class Fold:
    """Delays every line for a moment, and returns it with all ranks that printed it in that moment.

    Lines come out in the order in which they came, and lines of one rank never change their order.
    """

    def __init__(self, num_ranks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._groups: deque[_Group] = deque()
        self._ready: list[tuple[Line, list[int]]] = []
        self._first = 0  # number of the group at the head
        self._by_text: dict[tuple[str, bytes], list[int]] = {}
        self._last: dict[int, int] = {}

    def add(self, lines: Iterable[Line]) -> None:
        """Add lines in the order in which they came."""
        until = self._clock() + WINDOW_S
        for line in lines:
            key = (line.stream, line.text)
            # A line joins a group only behind the rank's previous line; else the two would change places.
            after = self._last.get(line.rank, -1)
            numbers = self._by_text.setdefault(key, [])
            number = next((number for number in numbers if number > after), None)
            if number is None:
                number = self._first + len(self._groups)
                self._groups.append(_Group(line, [line.rank], until))
                numbers.append(number)
            else:
                self._groups[number - self._first].ranks.append(line.rank)
            self._last[line.rank] = number
            if len(self._groups) > _MOST_HELD:
                self._release()

    def take(self, *, everything: bool = False) -> list[tuple[Line, list[int]]]:
        """Return the lines whose delay is over, or which every rank has printed, each with its ranks in order."""
        now = self._clock()
        while self._groups:
            group = self._groups[0]
            if not everything and now < group.until and len(group.ranks) < self._num_ranks:
                break
            self._release()
        taken, self._ready = self._ready, []
        return taken

    def _release(self) -> None:
        """Move the oldest group to those that can be returned."""
        group = self._groups.popleft()
        self._ready.append((group.line, sorted(group.ranks)))
        key = (group.line.stream, group.line.text)
        numbers = self._by_text[key]
        numbers.remove(self._first)
        if not numbers:
            del self._by_text[key]
        self._first += 1


def parse_only(words: Sequence[str], rows: Sequence[RankRow]) -> frozenset[int] | str:
    """The ranks that `--only` names, all if it is not given; or the first of its values that names no rank.

    A word is `role=NAME`, `host=NAME` or `rank=` with numbers: `rank=3`, `rank=0-3,7`; several words add up.
    """
    if not words:
        return frozenset(row.rank for row in rows)
    chosen: set[int] = set()
    for word in words:
        kind, _, value = word.partition("=")
        named = {
            "role": lambda: {row.rank for row in rows if row.role == value},  # noqa: B023 - called at once
            "host": lambda: {row.rank for row in rows if row.host == value},  # noqa: B023
            "rank": lambda: _ranks(value) & {row.rank for row in rows},  # noqa: B023
        }.get(kind, set)()
        if not named:
            return word
        chosen |= named
    return frozenset(chosen)


def only_choices(rows: Sequence[RankRow]) -> list[str]:
    """The values that `--only` can take, for messages and completion."""
    roles = [f"role={role}" for role in dict.fromkeys(row.role for row in rows)]
    hosts = [f"host={host}" for host in dict.fromkeys(row.host for row in rows)]
    return [*roles, *hosts, *(f"rank={row.rank}" for row in rows)]


def render_ranks(ranks: Sequence[int]) -> str:
    """Sorted ranks as short text: `0-3,7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(str(rank) for rank in part) for part in parts)


def render_line(line: Line, ranks: Collection[int], *, roles: Sequence[str]) -> bytes:
    """Render a line with its rank and role in front, or with the number of ranks that printed it and which."""
    if len(ranks) == 1:
        return f"rank {line.rank} {roles[line.rank]} | ".encode() + line.text
    return f"×{len(ranks)} ranks {render_ranks(sorted(ranks))} | ".encode() + line.text


def _ranks(text: str) -> set[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return set()
        ranks |= set(range(int(first), min(int(last or first), 10**6) + 1))
    return ranks


class ShownOutput:
    """The lines that a view shows of a run, read from its folder; each call of `poll` yields those that are due."""

    def __init__(
        self, folder: Path, rows: Sequence[RankRow], *, only: Collection[int], streams: Collection[str]
    ) -> None:
        """Begin.

        Args:
            folder: The run's.
            rows: All ranks of the run.
            only: The ranks whose lines are shown.
            streams: Which of `stdout` and `stderr` are shown.
        """
        self._log = MergedLog(folder, [row.rank for row in rows])
        self._roles = [clean(row.role) for row in rows]
        self._only = only
        self._streams = streams
        self._fold = Fold(len(only))

    def poll(self) -> Iterator[tuple[str, bytes]]:
        """Yield the lines that are due, each with its stream; only some are held at a time, however many are new."""
        yield from self._folded(self._log.poll())

    def finish(self, *, rest: bool = False) -> Iterator[tuple[str, bytes]]:
        """Yield everything that is left; with `rest` also lines that the launcher could not put in order any more."""
        yield from self._folded(self._log.poll())
        if rest:
            yield from self._folded(self._log.rest())
        yield from self._take(everything=True)

    def _folded(self, lines: Iterable[Line]) -> Iterator[tuple[str, bytes]]:
        chosen = (line for line in lines if self._is_shown(line))
        while some := list(islice(chosen, _MOST_HELD)):
            self._fold.add(some)
            yield from self._take(everything=False)
        yield from self._take(everything=False)

    def _is_shown(self, line: Line) -> bool:
        return line.rank in self._only and line.stream in self._streams

    def _take(self, *, everything: bool) -> list[tuple[str, bytes]]:
        taken = self._fold.take(everything=everything)
        return [(line.stream, render_line(line, ranks, roles=self._roles)) for line, ranks in taken]
