"""What the page's questions read: runs by their names in one folder, kept open while somebody looks at them."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ttlaunch.dashboard.cache import Cache
from ttlaunch.dashboard.catalogue import Catalogue
from ttlaunch.dashboard.facts import differences_as_json, run_as_json
from ttlaunch.dashboard.live import LiveRun
from ttlaunch.dashboard.picture import picture_as_json
from ttlaunch.dashboard.serving import serving_as_json
from ttlaunch.dashboard.steps import steps_as_json
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.running.logs import pages
from ttlaunch.running.readers.waits import waits_now
from ttlaunch.running.runs.facts import read_facts, with_joined
from ttlaunch.running.runs.launcher import is_running

_MOST_OPEN: Final = 8
"""How many runs are kept open; the one that nobody has asked for longest gives way."""


class UnknownRunError(Exception):
    """The folder of runs has no run of this name."""


class Reading:
    """Reads the runs of one folder. Its methods may be called by several threads."""

    def __init__(self, runs_folder: Path, cache: Cache | None = None) -> None:
        """Read the runs of a folder.

        Args:
            runs_folder: The folder of the runs.
            cache: Where what was made of long runs is kept; None reads all runs as a whole.
        """
        self.catalogue = Catalogue(runs_folder, cache.list_of(runs_folder) if cache else None)
        self.cache = cache
        self._open: OrderedDict[Path, LiveRun] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """End what still reads."""
        if self.cache is not None:
            self.cache.end()

    def facts(self, run: str) -> dict[str, Any]:
        """Return everything about a run but its numbers and its output."""
        path = self.path_of(run)
        live = self.live(run)
        if self.cache is None or not live.is_long:
            return run_as_json(path)
        return run_as_json(path, ranks=live.states, measured=self.cache.measured(path))

    def steps(self, run: str, *, most: int) -> dict[str, Any]:
        """Return the timeline of a run's last steps."""
        return steps_as_json(self.path_of(run), most=most)

    def waits(self, run: str) -> dict[str, Any]:
        """Return who waits for whom in a run at this moment; nothing once it has ended."""
        path, live = self.path_of(run), self.live(run)
        known = waits_now(path, live.states, is_recipe=read_facts(path).is_recipe) if is_running(path) else []
        return {"waits": [one.as_json() for one in known]}

    def picture(self, run: str) -> dict[str, Any]:
        """Return the picture of a run's cluster, None if it has none."""
        return {"picture": picture_as_json(self.path_of(run))}

    def serving(self, run: str) -> dict[str, Any]:
        """Return what a serving run answers, and where."""
        path = self.path_of(run)
        return serving_as_json(path, read_facts(path).ranks)

    def differences(self, run: str, other: str) -> dict[str, Any]:
        """Return how a run differs from another one."""
        return differences_as_json(self.path_of(other), self.path_of(run))

    def live(self, run: str) -> LiveRun:
        """Return a run with its numbers, read up to now."""
        path = self.path_of(run)
        with self._lock:
            found = self._open.get(path)
            if found is not None:
                found.poll()
            if found is None or found.is_replaced:
                found = self._open[path] = LiveRun(path, self.cache)
            self._open.move_to_end(path)
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
            return found

    def logs(self, run: str, *, query: Mapping[str, str], most: int) -> dict[str, Any]:
        """Return a page of a run's output.

        Args:
            run: The run.
            query: `before` or `after`, a place, the end unless given; `ranks`, numbers with commas; `host`; `stream`; `level`;
                `text`; `fold`.
            most: How many lines the page has at most.

        Raises:
            ValueError: The query is not usable.
        """
        path = self.path_of(run)
        rows = with_joined(read_facts(path), path).ranks
        wanted = _wanted(query, rows)
        if "after" in query:
            page = pages.page_after(path, _place(query["after"]), wanted, most=most)
        else:
            before = _place(query["before"]) if "before" in query else pages.end_of(path)
            page = pages.page_before(path, before, wanted, most=most)
        if query.get("fold") == "1":
            page = pages.fold_page(page, num_ranks=len(wanted.ranks))
        lines = [_line_as_json(entry, rows) for entry in page.lines]
        ends = {"before": str(page.before), "after": str(page.after)}
        return {"lines": lines, **ends, "is_first": page.is_first, "is_last": page.is_last}

    def path_of(self, run: str) -> Path:
        """Return the folder of a run.

        Raises:
            UnknownRunError: The folder of runs has no such run.
        """
        path = self.catalogue.find(run)
        if path is None:
            raise UnknownRunError(f"there is no run {clean(run)[:200]} in {self.catalogue.runs_folder}")
        return path


def _place(text: str) -> pages.Place:
    place = pages.parse_place(text)
    if place is None:
        raise ValueError("that is no place in the output")
    return place


def _wanted(query: Mapping[str, str], rows: Sequence[RankRow]) -> pages.Wanted:
    level = query.get("level") or "debug"
    if level not in pages.LEVELS:
        raise ValueError(f"there is no level {clean(level)[:40]}")
    chosen = {int(one) for one in query.get("ranks", "").split(",") if one.isascii() and one.isdecimal()}
    host, stream = query.get("host"), query.get("stream")
    return pages.Wanted(
        ranks={row.rank for row in rows if (not chosen or row.rank in chosen) and host in {None, "", row.host}},
        streams=(stream,) if stream else ("stdout", "stderr"),
        least=pages.LEVELS.index(level),
        text=query.get("text", "")[:1000],
    )


def _line_as_json(
    entry: tuple[pages.JudgedLine, Sequence[int], pages.Place], rows: Sequence[RankRow]
) -> dict[str, Any]:
    line, ranks, place = entry
    row = rows[line.rank] if line.rank < len(rows) else None
    return {
        "place": str(place),
        "ranks": ranks,
        "role": clean(row.role) if row else "?",
        "host": clean(row.host) if row else "?",
        "stream": line.stream,
        "level": line.level,
        "time": line.time,
        "text": pages.shown_text(line),
        "offset": line.offset,
        "length": line.length,
    }
