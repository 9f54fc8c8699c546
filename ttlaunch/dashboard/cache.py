"""What the page knows of long runs beside their folders: where it is kept, and the process that makes it at low priority.

A run whose ranks have written more than a few megabytes is first shown from the ends of its files. Meanwhile a process reads the whole
of it once; what it leaves is read from then on, and made anew when the run has grown by as much as memory should hold.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ttlaunch import contract
from ttlaunch.dashboard.stored import StoredPoints
from ttlaunch.planning.launch_plan import RankRow
from ttlaunch.records.regular_files import open_regular
from ttlaunch.running.metrics.log_place import LogPlace, parse_log_place
from ttlaunch.running.runs.files import size_of, write_whole

LONG_BYTES: Final = 4 << 20
"""A run with more bytes of records and telemetry than this is long."""
INDEX_FILE, MEASURED_FILE, PROGRESS_FILE, FORMAT = "index.json", "measured.json", "progress.json", 1
_LARGEST_FILE = 64 << 20
_LARGEST_CACHE = 2 << 30


@dataclass(frozen=True)
class Index:
    """What was made of a long run.

    Attributes:
        place: How far the run was read.
        points: Its numbers up to there.
    """

    place: LogPlace
    points: StoredPoints


def size_of_records(path: Path, rows: tuple[RankRow, ...]) -> int:
    """Return how many bytes of records and telemetry the ranks of a run have written."""
    files = (name(row.rank) for row in rows for name in (contract.progress_file, contract.traffic_file))
    return sum(size_of(path / name) for name in files)


class Cache:
    """The folder with what was made of long runs, one run at a time."""

    def __init__(self, folder: Path | None) -> None:
        """Use a folder, which need not exist; with None, nothing is kept and made."""
        self.folder = folder
        self._lock = threading.Lock()
        self._child: tuple[Path, subprocess.Popen[bytes]] | None = None

    def place_of(self, path: Path) -> Path | None:
        """Return the folder for what is made of a run; a run of the same name that replaced it has another one."""
        if self.folder is None:
            return None
        try:
            status = (path / contract.PLAN_FILE).stat()
        except OSError:
            return None
        name = f"{path.resolve()}\0{status.st_dev}\0{status.st_ino}\0{status.st_mtime_ns}"
        return self.folder / hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def list_of(self, runs_folder: Path) -> Path | None:
        """Return the file for the rows of a folder's runs that have ended."""
        name = hashlib.sha256(os.fsencode(runs_folder.resolve())).hexdigest()[:32]
        return None if self.folder is None else self.folder / f"{name}.json"

    def index(self, path: Path) -> Index | None:
        """Return what was made of a run's numbers; None if there is nothing, or the run was not just added to since."""
        place = self.place_of(path)
        found = read_json(place / INDEX_FILE) if place else {}
        if place is None or found.get("format") != FORMAT:
            return None
        try:
            index = Index(parse_log_place(found["place"]), StoredPoints(place, found["blocks"]))
            ends = [(contract.progress_file, index.place.progress), (contract.traffic_file, index.place.telemetry)]
            is_there = all(size_of(path / file(int(rank))) >= end for file, one in ends for rank, end in one.items())
        except (KeyError, TypeError, ValueError):
            return None
        return index if is_there else None

    def measured(self, path: Path) -> dict[str, Any]:
        """Return what was made of a run's report; empty if there is nothing."""
        place = self.place_of(path)
        found = read_json(place / MEASURED_FILE).get("report") if place else None
        return found if isinstance(found, dict) else {}

    def progress(self, path: Path) -> float | None:
        """Return which share of a run was read by the process that is at work on it; None if there is none."""
        with self._lock:
            self._reap()
            place = self.place_of(path)
            if self._child is None or place is None or self._child[0] != path:
                return None
        return float(read_json(place / PROGRESS_FILE).get("share", 0.0))

    def make(self, path: Path) -> bool:
        """Begin to read the whole of a run, unless another one is being read; return whether it is being read."""
        place = self.place_of(path)
        if place is None or self.folder is None:
            return False
        with self._lock:
            self._reap()
            if self._child is None:
                try:
                    place.mkdir(parents=True, exist_ok=True)
                    self._prune(place)
                    self._child = path, _start(path, place)
                except OSError:
                    return False
            return self._child[0] == path

    def end(self) -> None:
        """End the process that is at work."""
        with self._lock:
            if self._child is not None:
                self._child[1].terminate()
                self._child[1].wait()
                self._child = None

    def _reap(self) -> None:
        if self._child is not None and self._child[1].poll() is not None:
            self._child = None

    def _prune(self, keep: Path) -> None:
        """Remove what was not made or read for longest, as long as the whole is larger than it may be."""
        assert self.folder is not None  # noqa: S101 - asked for only where there is one
        known = sorted((one.stat().st_mtime, one) for one in self.folder.iterdir() if one.is_dir() and one != keep)
        sizes = {one: sum(size_of(file) for file in one.rglob("*")) for _, one in known}
        left = sum(sizes.values())
        for _, one in known:
            if left <= _LARGEST_CACHE:
                return
            shutil.rmtree(one, ignore_errors=True)
            left -= sizes[one]


def find_cache(environment: Mapping[str, str]) -> Cache:
    """Return the user's cache, below `$XDG_CACHE_HOME` or else below `~/.cache`; none if neither names an absolute path."""
    base = environment.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):  # the XDG rules ignore a relative path
        home = environment.get("HOME", "")
        base = f"{home}/.cache" if home.startswith("/") else ""
    return Cache(Path(base) / "ttlaunch" / "dashboard" if base else None)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object that this module's process has written; empty if there is none."""
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
        data = file.read(_LARGEST_FILE + 1)
        content = json.loads(data) if data and len(data) <= _LARGEST_FILE else None
        return content if isinstance(content, dict) else {}
    return {}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object so that readers see all of it or nothing."""
    write_whole(path, json.dumps(content))


def _start(path: Path, place: Path) -> "subprocess.Popen[bytes]":
    """Start the process that reads a run; it ends with this one."""
    write_json(place / PROGRESS_FILE, {"share": 0.0})
    words = [sys.executable, "-m", "ttlaunch.dashboard.make_index", str(path), str(place), str(os.getpid())]
    child = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with contextlib.suppress(OSError):  # from here and not by itself, so that its imports do not delay the page either
        os.setpriority(os.PRIO_PROCESS, child.pid, 19)
    return child
