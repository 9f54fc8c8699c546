"""Make entries for a log server of what the ranks of a run print and report, each with a time that is always the same.

A server keeps one of two entries with the same labels, time and text. So a time depends only on what is in the run's folder: an
entry that is sent twice is there once, whoever sends it, and from whatever position.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.logs.levels import LevelJudge
from ttlaunch.running.logs.merged import Line, MergedLog
from ttlaunch.running.metrics.event_log import Event, LoggedRun
from ttlaunch.running.runs.facts import read_ranks
from ttlaunch.running.runs.files import read_object_if_any
from ttlaunch.running.runs.run_folder import start_time

LONGEST_ENTRY = 240_000
"""The most bytes of an entry's text; servers of Loki refuse lines over 256 KiB unless they are configured otherwise."""

_SERVERS = frozenset({"aggregator", "optimizer", "owner", "server"})
"""Roles that hold the state of the training; all others are workers in the label `job`."""

REPORTED, FAILED = "reported", "failure"
"""Sources of entries besides a rank's two streams: what it reports about its training, and the failure of the run."""
_REPORTS = (contract.KIND_STEP, contract.KIND_VALIDATION, contract.KIND_NOTE)
_LATEST_S = 9e9
_INSIDE_CHARACTER = range(0x80, 0xC0)
"""Bytes of UTF-8 with which no character begins."""
_MOST_NS = 2**63 - 1


@dataclass(frozen=True)
class Entry:
    """An entry of a log.

    Attributes:
        host: The value of the label of this name, such as `worker-rank0-mini2`.
        side: `worker` or `server`: the second part of the label `job`.
        time_ns: Nanoseconds since the epoch.
        text: At most `LONGEST_ENTRY` bytes in UTF-8.
        details: What else is known, by name; the values are text.
        source: `RANK:stdout`, `RANK:stderr`, `RANK:reported` or `RANK:failure`.
        end: The position in the source behind the entry; entries of one source come in the order of positions.
    """

    host: str
    side: str
    level: str
    time_ns: int
    text: str
    details: Mapping[str, str]
    source: str
    end: int


class LogEntries:
    """Makes the entries of a run as its folder grows; `poll` yields those that are new."""

    def __init__(self, path: Path, run: LoggedRun, *, after: Mapping[str, int] | None = None) -> None:
        """Begin with the first entry, or behind positions.

        Args:
            path: The run's folder.
            run: The facts about the run.
            after: By source, the position behind the last entry that is left out.
        """
        self._path, self._run = path, run
        self._rows = {row.rank: row for row in run.ranks}
        self._after = dict(after or {})
        self._log = MergedLog(path, [*self._rows])
        self._latest: dict[int, int] = {}
        self._started = start_time(run.run_id) or 0.0
        self._judges: dict[tuple[int, str], LevelJudge] = {}
        self._reported: dict[int, int] = {}

    def poll(self) -> Iterator[Entry]:
        """Yield the entries of new lines."""
        for line in self._log.poll():
            yield from self._of_line(line)

    def rest(self) -> Iterator[Entry]:
        """Yield, at the end of a run, the lines whose order nobody has recorded, and the failure."""
        for line in self._log.rest(unknown_time=self._started):
            yield from self._of_line(line)
        yield from self._failure()

    def of_event(self, event: Event) -> Iterator[Entry]:
        """Yield the entry of what a rank reports about its training; nothing for other events."""
        if event.rank is None or event.kind not in _REPORTS:
            return
        end = self._reported[event.rank] = self._reported.get(event.rank, 0) + 1
        text = _report_text(event)
        if text and not self._is_left_out(source := f"{event.rank}:{REPORTED}", end):
            step = {} if event.step is None else {"step": str(event.step)}
            yield self._entry(event.rank, "INFO", text, time_ns=ns_of(event.time), source=source, end=end, more=step)

    def _of_line(self, line: Line) -> Iterator[Entry]:
        level = self._level(line)
        source, end = f"{line.rank}:{line.stream}", line.offset + max(line.length, 1)
        texts = list(_parts(line.text.decode("utf-8", "replace")))
        for number, text in enumerate(texts, 1):
            time_ns = min(max(ns_of(line.time), self._latest.get(line.rank, -1) + 1), _MOST_NS)
            self._latest[line.rank] = time_ns
            part = {"part": f"{number}/{len(texts)}"} if len(texts) > 1 else {}
            if not self._is_left_out(source, end):
                # A line counts as sent with its last part; what is sent again has the same time and text.
                reached = end if number == len(texts) else line.offset
                yield self._entry(line.rank, level, text, time_ns=time_ns, source=source, end=reached, more=part)

    def _is_left_out(self, source: str, end: int) -> bool:
        return end <= self._after.get(source, -1)

    def _entry(
        self, rank: int, level: str, text: str, *, time_ns: int, source: str, end: int, more: Mapping[str, str]
    ) -> Entry:
        row = self._row(rank)
        role, host = (row.role, row.host) if row else ("worker", "unknown")
        side = "server" if role in _SERVERS else "worker"
        stream = source.partition(":")[2]
        known = {"rank": str(rank), "role": role, "run": self._run.run_id, "recipe": self._run.recipe, "stream": stream}
        return Entry(f"{side}-rank{rank}-{host}", side, level, time_ns, text, {**known, **more}, source, end)

    def _row(self, rank: int) -> RankRow | None:
        if rank not in self._rows:  # a worker that has joined since
            try:
                self._rows |= {row.rank: row for row in read_ranks(self._path)}
            except (OSError, ValueError):
                return None
        return self._rows.get(rank)

    def _level(self, line: Line) -> str:
        key = line.rank, line.stream
        judge = self._judges.get(key)
        if judge is None:
            judge = self._judges[key] = LevelJudge(line.stream)
        return judge.level(line.text)

    def _failure(self) -> Iterator[Entry]:
        """Yield the entry of the run's failure, in the words of its report."""
        failure = read_object_if_any(self._path / contract.REPORT_FILE).get("failure")
        if not isinstance(failure, dict):
            return
        rank, time = failure.get("rank"), failure.get("time")
        known = rank if isinstance(rank, int) and self._row(rank) else next(iter(self._rows), 0)
        time_ns = ns_of(time) if isinstance(time, int | float) else self._latest.get(known, ns_of(self._started)) + 1
        source = f"{known}:{FAILED}"
        if not self._is_left_out(source, 1):
            text = next(_parts(_failure_text(failure, has_rank=rank == known)))
            yield self._entry(known, "ERROR", text, time_ns=time_ns, source=source, end=1, more={})


def _failure_text(failure: Mapping[str, Any], *, has_rank: bool) -> str:
    step, when = failure.get("step"), failure.get("when")
    at = f" in step {step}" if step else f" {when}" if when else ""
    who = f"rank {failure['rank']} ({failure.get('role')}, {failure.get('host')}) " if has_rank else ""
    evidence = [str(one) for one in failure.get("evidence") or () if isinstance(one, str)][:1]
    return "; ".join([f"error[{failure.get('code')}]: {who}{failure.get('cause')}{at}", *evidence])


def _report_text(event: Event) -> str:
    """Return what a rank reports, as one line: `step 3: loss 2.5, tokens 50`."""
    if event.kind == contract.KIND_NOTE:
        return str(event.values.get("text", ""))
    numbers = [
        f"{name} {value:.6g}"
        for name, value in event.values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    what = "validation, " if event.kind == contract.KIND_VALIDATION else ""
    return f"{what}step {event.step}: {', '.join(numbers)}" if numbers else f"{what}step {event.step}"


def _parts(text: str) -> Iterator[str]:
    """Divide a text into parts of at most `LONGEST_ENTRY` bytes in UTF-8, between characters."""
    data = text.encode()
    if len(data) <= LONGEST_ENTRY:
        yield text
        return
    at = 0
    while at < len(data):
        end = min(at + LONGEST_ENTRY, len(data))
        while end < len(data) and data[end] in _INSIDE_CHARACTER:
            end -= 1
        yield data[at:end].decode()
        at = end


def ns_of(time: float) -> int:
    """Return a time in seconds as nanoseconds, in whole microseconds; one that no clock shows becomes the nearest."""
    possible = min(max(time, 0.0), _LATEST_S)
    return 0 if math.isnan(possible) else round(possible * 1e6) * 1000
