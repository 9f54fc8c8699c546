"""Choose which lines of the ranks are shown, and fold equal lines that several ranks print at about the same time."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from ttlaunch import contract
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.logs.merged import Line, MergedLog
from ttlaunch.running.watch import RankState

WINDOW_S = 0.15
"""How long a line is held back so that the same line of other ranks can join it."""
_MOST_HELD = 2048
_LONGEST_LAST = 1024


@dataclass
class _Group:
    line: Line
    ranks: list[int]
    until: float


class Fold:
    """Holds each line back for a moment, and returns it with all ranks that printed it in this time.

    Lines are returned in the order in which they were first added. Lines of one rank never change their order.
    """

    def __init__(self, num_ranks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._groups: deque[_Group] = deque()
        self._ready: list[tuple[Line, list[int]]] = []
        self._first = 0  # the number of the oldest group
        self._by_text: dict[tuple[str, bytes], list[int]] = {}
        self._last: dict[int, int] = {}

    def add(self, lines: Iterable[Line]) -> None:
        """Add lines in the order in which they were printed."""
        until = self._clock() + WINDOW_S
        for line in lines:
            key = (line.stream, line.text)
            # A line may only join a group after that of the rank's previous line; else the two would change places.
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
        """Return the lines whose time is over or which every rank has printed, each with its ranks in order."""
        now = self._clock()
        while self._groups:
            group = self._groups[0]
            if not everything and now < group.until and len(group.ranks) < self._num_ranks:
                break
            self._release()
        taken, self._ready = self._ready, []
        return taken

    def _release(self) -> None:
        """Move the oldest group to the lines that `take` returns next."""
        group = self._groups.popleft()
        self._ready.append((group.line, sorted(group.ranks)))
        key = (group.line.stream, group.line.text)
        numbers = self._by_text[key]
        numbers.remove(self._first)
        if not numbers:
            del self._by_text[key]
        self._first += 1


def parse_only(values: Sequence[str], rows: Sequence[RankRow]) -> frozenset[int] | str:
    """Return the ranks that the values of `--only` name, or all without values; or the first value that names no rank.

    A value is `role=NAME`, `host=NAME`, or `rank=` with numbers: `rank=3`, `rank=0-3,7`; in an elastic run also the name of a worker, such as
    `worker-0003`. The ranks of all values are shown.
    """
    if not values:
        return frozenset(row.rank for row in rows)
    chosen: set[int] = set()
    workers = {contract.worker_name(row.rank): {row.rank} for row in rows} if _is_elastic(rows) else {}
    for given in values:
        kind, _, value = given.partition("=")
        named = {
            "role": lambda: {row.rank for row in rows if row.role == value},  # noqa: B023 - called at once
            "host": lambda: {row.rank for row in rows if row.host == value},  # noqa: B023
            "rank": lambda: _ranks(value) & {row.rank for row in rows},  # noqa: B023
        }.get(kind, lambda: workers.get(given, set()))()  # noqa: B023
        if not named:
            return given
        chosen |= named
    return frozenset(chosen)


def only_choices(rows: Sequence[RankRow]) -> list[str]:
    """Return the values that `--only` can have, for messages and completion."""
    roles = [f"role={role}" for role in dict.fromkeys(row.role for row in rows)]
    hosts = [f"host={host}" for host in dict.fromkeys(row.host for row in rows)]
    name = contract.worker_name if _is_elastic(rows) else "rank={}".format
    return [*roles, *hosts, *(name(row.rank) for row in rows)]


def _is_elastic(rows: Sequence[RankRow]) -> bool:
    return any(row.later for row in rows)


def render_ranks(ranks: Sequence[int]) -> str:
    """Render sorted ranks as a short text such as `0-3,7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(str(rank) for rank in part) for part in parts)


def name_of(row: RankRow, *, is_elastic: bool) -> str:
    """Return what views call a rank: by rank and role, or as a worker whose rank changes with the members of its run."""
    return contract.worker_name(row.rank) if is_elastic else f"rank {row.rank} {clean(row.role)}"


def render_line(line: Line, ranks: Collection[int], *, names: Sequence[str], is_elastic: bool = False) -> bytes:
    """Render a line after its rank's name, or if several ranks printed it, after their number and a list of them."""
    if len(ranks) == 1:
        return f"{names[line.rank]} | ".encode() + line.text
    what = "workers" if is_elastic else "ranks"
    return f"×{len(ranks)} {what} {render_ranks(sorted(ranks))} | ".encode() + line.text


def _ranks(text: str) -> set[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return set()
        ranks |= set(range(int(first), min(int(last or first), 10**6) + 1))
    return ranks


class ShownOutput:
    """Reads from a run's folder the lines of ranks that a view shows, and folds equal lines."""

    def __init__(
        self, folder: Path, rows: Sequence[RankRow], *, only: Collection[int], streams: Collection[str]
    ) -> None:
        """Begin at the first line.

        Args:
            folder: The run's folder.
            rows: All ranks of the run.
            only: The ranks whose lines are shown.
            streams: Which of `stdout` and `stderr` are shown.
        """
        self._last: dict[int, bytes] = {}
        self._log = MergedLog(folder, [row.rank for row in rows])
        self._is_elastic = _is_elastic(rows)
        self._names = [name_of(row, is_elastic=self._is_elastic) for row in rows]
        self._only = only
        self._streams = streams
        self._fold = Fold(len(only))

    def poll(self) -> Iterator[tuple[str, bytes]]:
        """Yield the new lines that need not be held back any more, each with its stream, reading some at a time."""
        yield from self._folded(self._log.poll())

    def finish(self, *, rest: bool = False) -> Iterator[tuple[str, bytes]]:
        """Yield all remaining lines; with `rest` also those whose order the launcher has not recorded."""
        yield from self._folded(self._log.poll())
        if rest:
            yield from self._folded(self._log.rest())
        yield from self._take(everything=True)

    def note_last(self, ranks: Iterable[RankState]) -> None:
        """Set each rank's last line, without empty ones, to the newest that was read; also of ranks that are not shown."""
        for state in ranks:
            state.last_line = self._last.get(state.row.rank, b"")

    def _folded(self, lines: Iterable[Line]) -> Iterator[tuple[str, bytes]]:
        chosen = (line for line in lines if self._is_shown(line))
        while some := list(islice(chosen, _MOST_HELD)):
            self._fold.add(some)
            yield from self._take(everything=False)
        yield from self._take(everything=False)

    def _is_shown(self, line: Line) -> bool:
        if line.text.strip():
            self._last[line.rank] = line.text[:_LONGEST_LAST]
        return line.rank in self._only and line.stream in self._streams

    def _take(self, *, everything: bool) -> list[tuple[str, bytes]]:
        taken = self._fold.take(everything=everything)
        return [
            (line.stream, render_line(line, ranks, names=self._names, is_elastic=self._is_elastic))
            for line, ranks in taken
        ]
