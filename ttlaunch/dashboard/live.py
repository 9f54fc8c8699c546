"""A run that somebody looks at: its numbers and the state of its ranks, kept up to date, and its changes as numbered events.

Each change has a number. Whoever knows everything up to a number can ask for what came later; if that is too long ago, or the
server is another one, the answer is `reset`, and the reader asks for everything again. So no event is missed or counted twice.
"""

import contextlib
import json
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ttlaunch import contract
from ttlaunch.dashboard.cache import LONG_BYTES, Cache, size_of_records
from ttlaunch.dashboard.numbers import Numbers, Point, number, series_as_json
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.running.logs.pages import end_of
from ttlaunch.running.metrics.event_log import EventLog, read_logged_run
from ttlaunch.running.metrics.log_place import place_near_end
from ttlaunch.running.runs.facts import MEMBERS_FILE
from ttlaunch.running.runs.files import size_of
from ttlaunch.running.runs.launcher import is_running
from ttlaunch.running.watch import RankState

_KEPT: Final = 512
_MOST_POINTS = 4000
"""How many points one event has at most; a reader of more is told to ask for the series again."""
_LOOK_AT_PROCESSES_S = 1.0
_LOOK_AT_CACHE_S = 0.5
_MOST_TRIES = 3
_MOST_IN_MEMORY = 1_000_000
"""How many points of a long run are kept before the whole of it is read again for the cache, at 24 bytes each."""
LAST_STEPS: Final = 1000
"""How many steps of a long run are shown before the whole of it was read."""


@dataclass(frozen=True)
class Change:
    """A numbered event: `points`, `ranks`, `log`, `facts`, `reading`, or `reset`."""

    number: int
    kind: str
    content: Mapping[str, Any]


class LiveRun:
    """One run. Its methods may be called by several threads; `poll` reads what is new, the others only what it has read.

    Of a long run, only what comes after the part that the cache has is read, or, as long as it has nothing, the last steps.
    """

    def __init__(self, path: Path, cache: Cache | None = None, *, long_bytes: int = LONG_BYTES) -> None:
        """Begin to read a run.

        Args:
            path: The run's folder.
            cache: Where what was made of long runs is; None reads the whole run, however long it is.
            long_bytes: How many bytes of records make a run long.

        Raises:
            OSError: The run's plan cannot be read.
            ValueError: The file is not a plan.
        """
        self.path = path
        self.token = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._cache = cache
        self._long_bytes = long_bytes
        self._changes: deque[Change] = deque(maxlen=_KEPT)
        self._open()
        self._last = 0
        self._seen: dict[str, Any] = {}
        self._looked = -_LOOK_AT_PROCESSES_S
        self._asked = -_LOOK_AT_CACHE_S
        self._polled = -math.inf
        self._known_share: float | None = None
        self._awaits = False
        self._tries = 0
        self._is_running = False
        self.poll()

    def _open(self) -> None:
        """Read what the cache has of the run, if it is long."""
        self._plan, self._size, self._is_replaced = _mark_of(self.path), 0, False
        rows = read_logged_run(self.path).ranks
        self._index = None
        self._is_partial = False
        place, stored = None, None
        if self._cache is not None and size_of_records(self.path, rows) > self._long_bytes:
            self._index = self._cache.index(self.path)
            if self._index is not None:
                place, stored = self._index.place, self._index.points
            elif self._cache.folder is not None:
                place, self._is_partial = place_near_end(self.path, rows, most=LAST_STEPS), True
        self._log, self._numbers = EventLog(self.path, place=place), Numbers(stored)

    @property
    def is_partial(self) -> bool:
        """Whether only the last steps of the run are known yet."""
        return self._is_partial

    @property
    def is_long(self) -> bool:
        """Whether only a part of the run's files is read here."""
        return self._is_partial or self._index is not None

    @property
    def is_replaced(self) -> bool:
        """Whether the folder has become that of another run, or has been copied anew, since it was read: then all has to be read again."""
        return self._is_replaced

    @property
    def states(self) -> list[RankState]:
        """The states of the ranks, as far as they were read; without speeds as long as only the last steps are known."""
        return self._log.states

    @property
    def last(self) -> int:
        """The number of the newest change."""
        return self._last

    def poll(self, *, every_s: float = 0.0) -> bool:
        """Read what is new; return whether anything has changed.

        Args:
            every_s: If it was read a shorter time ago, nothing is read, so that several readers of a run cost hardly more than one.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._polled < every_s:
                return False
            self._polled = now
            self._look_for_another()
            before = self._last
            self._note("reading", {"share": self._share()})
            if not before:  # nobody has to be told of single points yet
                self._numbers.add_columns(self._log.unordered_in_columns())
            elif points := self._numbers.add(self._log.unordered()):
                self._note_points(points)
            self._note("ranks", {"ranks": [rank_as_json(state) for state in self._log.states]})
            self._note("log", {"end": str(end_of(self.path))})
            self._note("facts", self._facts())
            self._last = max(1, self._last)
            return self._last > before

    def _look_for_another(self) -> None:
        """Notice that the plan is another one, or that the records have become fewer, which those of a run never do."""
        size = size_of_records(self.path, tuple(state.row for state in self._log.states))
        self._is_replaced = self._is_replaced or size < self._size or _mark_of(self.path) != self._plan
        self._size = size

    def _share(self) -> float | None:
        """Return which share of the run was read for the cache, and begin anew once all numbers were; None if nothing is to be read."""
        if self._cache is None or not (self._is_partial or self._awaits or self._numbers.count > _MOST_IN_MEMORY):
            return None
        now = time.monotonic()
        if now - self._asked < _LOOK_AT_CACHE_S:
            return self._known_share
        self._asked = now
        share = self._cache.progress(self.path)
        self._awaits = share is not None
        index = self._cache.index(self.path)
        if index is not None and (self._index is None or index.place != self._index.place):
            self._open()
            self._tries = 0
            self._changes.clear()
            self._add("reset", {})
        elif share is None and self._tries < _MOST_TRIES and self._cache.make(self.path):
            self._tries += 1
            self._awaits, share = True, 0.0
        self._known_share = share
        return share

    def since(self, token: str, number: int) -> list[Change]:
        """Return the changes after a number that this run has given out; a `reset` if some of them are not known any more."""
        with self._lock:
            first = self._changes[0].number if self._changes else self._last + 1
            if token != self.token or not first - 1 <= number <= self._last:
                return [Change(self._last, "reset", {})]
            return [change for change in self._changes if change.number > number]

    def names(self) -> dict[str, Any]:
        """Return the names of all numbers with the ranks that measured them."""
        with self._lock:
            known = {"is_partial": self._is_partial, "reading": self._known_share}
            return {"token": self.token, "number": self._last, "names": self._numbers.names, **known}

    def series(self, name: str, *, first: int | None, last: int | None, most: int) -> dict[str, Any]:
        """Return a number by rank, with the number of the newest change that is part of it."""
        with self._lock:
            ranks = {
                str(rank): series_as_json(one, first=first, last=last, most=most)
                for rank, one in self._numbers.of(name, first=first, last=last)
            }
            return {"token": self.token, "number": self._last, "name": name, "ranks": ranks}

    def _facts(self) -> dict[str, Any]:
        """Return what has to change before a reader needs the run's facts again."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_AT_PROCESSES_S:
            self._looked, self._is_running = now, is_running(self.path)
        sizes = [size_of(self.path / name) for name in (contract.REPORT_FILE, contract.EVENTS_FILE, MEMBERS_FILE)]
        return {"is_running": self._is_running, "sizes": sizes}

    def _note_points(self, points: list[Point]) -> None:
        if len(points) > _MOST_POINTS:
            self._changes.clear()
            self._add("reset", {})
            return
        rows = [[point.name, point.rank, point.step, point.time, number(point.value)] for point in points]
        self._add("points", {"points": rows})

    def _note(self, kind: str, content: Mapping[str, Any]) -> None:
        """Add a change if its content is another one than the last of its kind."""
        text = json.dumps(content)
        if self._seen.get(kind) != text:
            self._seen[kind] = text
            self._add(kind, content)

    def _add(self, kind: str, content: Mapping[str, Any]) -> None:
        self._last += 1
        self._changes.append(Change(self._last, kind, content))


def _mark_of(path: Path) -> tuple[int, int]:
    """Return what is another one for another plan; zeros if there is none."""
    with contextlib.suppress(OSError):
        found = (path / contract.PLAN_FILE).stat()
        return found.st_ino, found.st_mtime_ns
    return 0, 0


def rank_as_json(state: RankState) -> dict[str, Any]:
    """Return what a view shows of a rank while it runs."""
    return {
        "rank": state.row.rank,
        "role": clean(state.row.role),
        "host": clean(state.row.host),
        "state": state.connection or str(state.phase),
        "stage": clean(state.stage),
        "step": state.step,
        "total_steps": state.total_steps,
        "loss": None if state.loss is None else number(state.loss),
        "grad_norm": None if state.grad_norm is None else number(state.grad_norm),
        "speed": state.own_per_s(state.counts),
        "counts": state.counts,
        "place": state.place,
    }
