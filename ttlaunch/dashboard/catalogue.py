"""All runs for one list: their states, and a curve of the loss for which only a few places of one rank's file are read."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ttlaunch import contract
from ttlaunch.dashboard.cache import read_json, write_json
from ttlaunch.dashboard.numbers import number
from ttlaunch.diagnostics.terminal_text import clean
from ttlaunch.records.parser import BadRecord
from ttlaunch.records.ranks import StepDone, read_progress
from ttlaunch.records.regular_files import open_regular
from ttlaunch.running.runs.facts import run_folders
from ttlaunch.running.runs.files import size_of
from ttlaunch.running.runs.overview import RunSummary, summarise

_PLACES: Final = 40
"""At how many places of a rank's file a loss is looked for."""
_BLOCK = 2048
_MOST_S = 0.3
"""How long one list takes at most; of more runs than can be read by then, the newest come first."""
_TOGETHER = 16
_MOST_RANKS = 16


class Catalogue:
    """The runs in one folder. What ended runs look like is read once, and kept for the next time."""

    def __init__(self, runs_folder: Path, kept: Path | None = None) -> None:
        """Begin with what is kept.

        Args:
            runs_folder: The folder of the runs.
            kept: The file for the rows of ended runs; None keeps nothing.
        """
        self.runs_folder = runs_folder
        self._lock = threading.Lock()
        self._kept = kept
        self._rows: dict[str, tuple[int, dict[str, Any]]] = {}
        self._curves: dict[Path, tuple[int, list[tuple[int, float]]]] = {}
        self._is_new = False
        if kept is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self._rows = {str(name): (int(mark), dict(row)) for name, mark, row in read_json(kept)["rows"]}

    def find(self, run_id: str) -> Path | None:
        """Return the folder of a run; None if the folder of runs has no such run. No other folder can be named."""
        if not run_id or run_id.startswith(".") or "/" in run_id or "\0" in run_id:
            return None
        path = self.runs_folder / run_id
        return path if (path / contract.PLAN_FILE).is_file() else None

    def as_json(self, *, most_s: float = _MOST_S) -> dict[str, Any]:
        """Return the runs, newest first, and how many of them there was no time for; the next call reads further ones."""
        until = time.monotonic() + most_s
        with self._lock:
            marks = {path.name: _mark(path) for path in run_folders(self.runs_folder)}
            for gone in self._rows.keys() - marks.keys():
                del self._rows[gone]
            fresh = [name for name, mark in marks.items() if not mark or self._rows.get(name, (None,))[0] != mark]
            left = sorted(fresh, reverse=True)
            while left and (time.monotonic() < until or len(left) == len(fresh)):
                some, left = left[:_TOGETHER], left[_TOGETHER:]
                for run in summarise(self.runs_folder / name for name in some):
                    self._rows[run.folder.name] = marks[run.folder.name], self._row(run)
                    self._is_new = self._is_new or bool(marks[run.folder.name])
            if not left:
                self._keep()
            rows = [row for _, row in self._rows.values()]
            rows.sort(key=lambda row: (row["started"] or 0.0, row["run_id"]), reverse=True)
            pending = sum(name not in self._rows for name in left)
            return {"folder": str(self.runs_folder), "runs": rows, "pending": pending}

    def _keep(self) -> None:
        if self._kept is None or not self._is_new:
            return
        self._is_new = False
        rows = [[name, mark, row] for name, (mark, row) in self._rows.items() if mark]
        with contextlib.suppress(OSError):
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._kept, {"rows": rows})

    def _row(self, run: RunSummary) -> dict[str, Any]:
        curve = self._curve(run)
        return {**summary_as_json(run), "curve": [[step, number(loss)] for step, loss in curve]}

    def _curve(self, run: RunSummary) -> list[tuple[int, float]]:
        """Return losses at a few steps, from the first rank that reports some."""
        for rank in range(min(run.ranks, _MOST_RANKS)):
            path = run.folder / contract.progress_file(rank)
            size = size_of(path)
            if self._curves.get(path, (None,))[0] != size:
                self._curves[path] = size, sorted(dict(_losses(path, size)).items())
            if curve := self._curves[path][1]:
                return curve
        return []


def summary_as_json(run: RunSummary) -> dict[str, Any]:
    """Return a run's line of the list; the numbers are those of `ttlaunch ps`."""
    return {
        "run_id": run.folder.name,
        "name": clean(run.name),
        "state": run.state,
        "is_over": run.is_over,
        "step": run.step,
        "total_steps": run.total_steps,
        "loss": None if run.loss is None else number(run.loss),
        "ranks": run.ranks,
        "started": run.started,
        "ended": run.ended,
        "machine": None if run.machine is None else clean(run.machine),
    }


def _mark(path: Path) -> int:
    """Return a number that is another one after a run's end was rewritten; 0 while it may still change."""
    with contextlib.suppress(OSError):
        return (path / contract.REPORT_FILE).stat().st_mtime_ns
    return 0


def _losses(path: Path, size: int) -> Iterator[tuple[int, float]]:
    """Yield a step and its loss from places spread over a file."""
    try:
        with open_regular(path) as file:
            for place in range(_PLACES + 1):
                end = max(min(size, _BLOCK), size * place // _PLACES)
                begin = max(0, end - _BLOCK)
                lines = os.pread(file.fileno(), end - begin, begin).split(b"\n")
                whole = lines[bool(begin) : -1]
                for line in reversed(whole) if place else whole:  # the curve begins with the first loss
                    record = read_progress(line)
                    if isinstance(record, StepDone) and record.loss is not None and not isinstance(record, BadRecord):
                        yield record.step, record.loss
                        break
    except OSError:
        return
