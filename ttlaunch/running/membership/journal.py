"""The journal of an elastic run, `members.jsonl`: a change of the members is written before any worker gets an order from it."""

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.records.parser import load
from ttlaunch.running.runs.facts import MEMBERS_FILE
from ttlaunch.running.runs.files import Tail
from ttlaunch.running.runs.run_folder import RunFolder

_MOST_BYTES = 64 * 1024 * 1024
_KEPT_ENTRIES = 4096


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
