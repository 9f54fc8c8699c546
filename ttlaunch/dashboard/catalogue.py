"""All runs for one list: their states, and a curve of the loss for which only a few places of one rank's file are read."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ttlaunch import contract
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
_MOST_RANKS = 16


class Catalogue:
    """The runs in one folder. What ended runs look like is read once."""

    def __init__(self, runs_folder: Path) -> None:
        self.runs_folder = runs_folder
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[int, RunSummary]] = {}
        self._curves: dict[Path, tuple[int, list[tuple[int, float]]]] = {}

    def find(self, run_id: str) -> Path | None:
        """Return the folder of a run; None if the folder of runs has no such run. No other folder can be named."""
        if not run_id or run_id.startswith(".") or "/" in run_id or "\0" in run_id:
            return None
        path = self.runs_folder / run_id
        return path if (path / contract.PLAN_FILE).is_file() else None

    def as_json(self) -> dict[str, Any]:
        """Return all runs, newest first."""
        with self._lock:
            folders = run_folders(self.runs_folder)
            marks = {path: _mark(path) for path in folders}
            fresh = [path for path in folders if self._known.get(path, (None,))[0] != marks[path] or not marks[path]]
            self._known |= {run.folder: (marks[run.folder], run) for run in summarise(fresh)}
            for gone in self._known.keys() - marks.keys():
                del self._known[gone]
            runs = sorted(
                (run for _, run in self._known.values()), key=lambda run: (run.started or 0.0, run.folder.name)
            )
            return {"folder": str(self.runs_folder), "runs": [self._row(run) for run in reversed(runs)]}

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
