"""Choose which lines of the ranks are shown, and fold those that several ranks print at the same moment into one."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.logs.merged import Line

WINDOW_S = 0.15
"""How long a line waits for the same line of other ranks."""
_MOST_HELD = 2048


@dataclass
class _Group:
    line: Line
    ranks: list[int]
    until: float


class Fold:
    """Holds every line back for a moment, and hands it out with all ranks that printed it in that moment.

    Lines come out in the order in which they came, and those of one rank never pass each other.
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
        """Take lines in."""
        until = self._clock() + WINDOW_S
        for line in lines:
            key = (line.stream, line.text)
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
        """The lines that need wait no longer, each with the ranks that printed it, in order of ranks."""
        now = self._clock()
        while self._groups:
            group = self._groups[0]
            if not everything and now < group.until and len(group.ranks) < self._num_ranks:
                break
            self._release()
        taken, self._ready = self._ready, []
        return taken

    def _release(self) -> None:
        """Let the oldest group go."""
        group = self._groups.popleft()
        self._ready.append((group.line, sorted(group.ranks)))
        key = (group.line.stream, group.line.text)
        numbers = self._by_text[key]
        numbers.remove(self._first)
        if not numbers:
            del self._by_text[key]
        self._first += 1


def parse_only(words: Sequence[str], rows: Sequence[RankRow]) -> frozenset[int] | str:
    """The ranks that `--only` names, all of them if it names none; or the first of its words that names nothing.

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
    """What `--only` may name."""
    roles = [f"role={role}" for role in dict.fromkeys(row.role for row in rows)]
    hosts = [f"host={host}" for host in dict.fromkeys(row.host for row in rows)]
    return [*roles, *hosts, *(f"rank={row.rank}" for row in rows)]


def render_ranks(ranks: Sequence[int]) -> str:
    """Sorted ranks as short as they can be said: `0-3,7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(str(rank) for rank in part) for part in parts)


def render_line(line: Line, ranks: Collection[int], *, roles: Sequence[str]) -> bytes:
    """A line as it is shown: with its rank and role in front, or how many ranks printed it and which."""
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
