"""A timeline of one rank: passes, updates, messages and waits of the first steps, on the rank's own clock.

Before and after the training, each rank measures how far rank 0's clock is ahead of its own (`comm/clocks.py`). With these
offsets the launcher puts the timelines of all ranks on one clock. Only runs started with `--trace` or
`--trace-steps` are traced.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.runtime.world import Rank

_MOST_EVENTS = 200_000


class Trace:
    """The events of the first steps, in memory until these are over, then in a file.

    Attributes:
        is_open: Whether events are still recorded.
    """

    def __init__(self, path: Path, *, steps: int) -> None:
        """Record events of the first `steps` steps of this run, at most `_MOST_EVENTS`, because they are kept in memory."""
        self.is_open = True
        self._path = path
        self._steps_left = steps
        self._events: list[list[Any]] = []
        self._counts: Counter[tuple[bool, Rank, int]] = Counter()

    def span(self, name: str, kind: str, *, began: int, ended: int, **facts: object) -> None:
        """Record what the rank did between two times, in nanoseconds of its monotonic clock."""
        if self.is_open:
            self._events.append(["span", name, kind, began, ended, facts])
            self.is_open = len(self._events) < _MOST_EVENTS

    def number(self, *, is_send: bool, peer: Rank, tag: int) -> int:
        """Number a message among those to or from a peer with the same tag; sender and receiver get the same number."""
        self._counts[is_send, peer, tag] += 1
        return self._counts[is_send, peer, tag]

    def message(self, name: str, *, is_send: bool, when: int, facts: Mapping[str, object]) -> None:
        """Record one end of a message: when its send began, or when its receive was complete."""
        if self.is_open:
            self._events.append(["send" if is_send else "recv", name, when, facts])

    def end_step(self) -> None:
        """Count a step; after the last traced one, write the events."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self.close()

    def note_clock(self, offset: int, error: int) -> None:
        """Write how far rank 0's clock is ahead of this rank's, and the largest possible error, in nanoseconds."""
        self._write([["clock", time.monotonic_ns(), offset, error]])

    def close(self) -> None:
        """Record no more events, and write those in memory to the file."""
        self.is_open = False
        self._write(self._events)
        self._events = []

    def _write(self, events: list[list[Any]]) -> None:
        """Append a line for each event; a full disk costs the trace, not the run."""
        lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)
        with (
            contextlib.suppress(OSError),
            open(self._path, "a", encoding="utf-8", opener=contract.open_private) as file,
        ):
            file.write(lines)


def open_trace(run_dir: Path, rank: Rank) -> Trace | None:
    """Return the trace of a rank; None if the run was started without one."""
    steps = os.environ.get(contract.ENV_TRACE_STEPS, "")
    return Trace(run_dir / contract.trace_file(rank), steps=int(steps)) if steps.isdecimal() else None
