"""The journal of an elastic run, `members.jsonl`: a change of the members is written before any worker gets an order from it."""

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.records.parser import checked, load
from ttlaunch.running.report import check_epoch
from ttlaunch.running.runs.facts import MEMBERS_FILE
from ttlaunch.running.runs.files import Tail
from ttlaunch.running.runs.run_folder import RunFolder

_MOST_BYTES = 64 * 1024 * 1024
_KEPT_ENTRIES = 4096
_OF_EPOCHS = ("epoch", "members", "step", "reasons", "computed_anew", "lost_steps")


class Journal:
    """Appends entries to the file, and keeps the newest in memory for onlookers.

    Attributes:
        error: Why an entry could not be written; from then on none is, and nobody joins any more. None if all were.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Write nothing yet."""
        self.error: OSError | None = None
        self._path = folder.file(MEMBERS_FILE)
        self._entries: deque[Mapping[str, Any]] = deque(maxlen=_KEPT_ENTRIES)

    @property
    def entries(self) -> list[Mapping[str, Any]]:
        """The newest entries, oldest first."""
        return list(self._entries)

    def write(self, what: str, **known: Any) -> None:
        """Append an entry before anything follows from it; never raises."""
        entry = {"time": round(time.time(), 3), "what": what, **known}
        self._entries.append(entry)
        if self.error is not None:
            return
        try:
            with open(self._path, "ab", buffering=0, opener=contract.open_private) as file:
                file.write(contract.record_line(entry).encode())
        except OSError as error:
            self.error = error


def read_journal(folder: Path) -> list[Mapping[str, Any]]:
    """Read the complete entries of a run's journal; none if the run was not elastic."""
    entries = map(load, Tail(folder / MEMBERS_FILE).read(most=_MOST_BYTES))
    return [entry for entry in entries if isinstance(entry, dict)]


def epochs_so_far(folder: Path) -> list[dict[str, Any]]:
    """Return the epochs of an elastic run as its report will have them, without what is only known at its end; damaged entries are left out."""
    found: list[dict[str, Any]] = []
    for entry in read_journal(folder):
        if entry.get("what") == "resumed":
            if found and found[-1]["epoch"] == entry.get("epoch"):
                with contextlib.suppress(ValueError):
                    found[-1]["pause_s"] = checked("Seconds", entry.get("pause_s"))
        elif entry.get("what") == "epoch":
            with contextlib.suppress(ValueError):
                check_epoch(entry)
                found.append({name: entry[name] for name in _OF_EPOCHS if name in entry})
    return found
