"""A timeline of one rank: passes, updates, messages and waits of the first steps, on the rank's own clock.

How far that clock is from rank 0's is measured with the same sockets before and after, so that the launcher can put the
timelines of all ranks into one. Nothing is traced unless it was asked for.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ttlaunch import contract
from ttlaunch.runtime.comm.protocol import Socket
from ttlaunch.runtime.world import Rank

_CLOCK = 30_020
_ROUNDS = 16
_MOST_EVENTS = 200_000


class Trace:
    """The events of the first steps, in memory until these are over, then in a file.

    Attributes:
        is_open: Whether events are still taken.
    """

    def __init__(self, path: Path, *, steps: int) -> None:
        """Take events up to the end of step `steps` of this run, and at most as many as fit into memory easily."""
        self.is_open = True
        self._path = path
        self._steps_left = steps
        self._events: list[list[Any]] = []
        self._counts: Counter[tuple[bool, Rank, int]] = Counter()

    def span(self, name: str, kind: str, began: int, ended: int, **facts: object) -> None:
        """Something that the rank did, from one time to another, in nanoseconds of its monotonic clock."""
        if self.is_open:
            self._events.append(["span", name, kind, began, ended, facts])
            self.is_open = len(self._events) < _MOST_EVENTS

    def number(self, *, is_send: bool, peer: Rank, tag: int) -> int:
        """Which message between these two, in this direction and with this tag, this one is; the same on both ends."""
        self._counts[is_send, peer, tag] += 1
        return self._counts[is_send, peer, tag]

    def message(self, name: str, *, is_send: bool, when: int, facts: Mapping[str, object]) -> None:
        """One end of a message: when its send began, or when its receive was complete."""
        if self.is_open:
            self._events.append(["send" if is_send else "recv", name, when, facts])

    def end_step(self) -> None:
        """Count a step; after the last one that was asked for, write the events."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self.close()

    def note_clock(self, offset: int, error: int) -> None:
        """Write how much later it is on rank 0 than here, and how wrong that may be, in nanoseconds."""
        self._write([["clock", time.monotonic_ns(), offset, error]])

    def close(self) -> None:
        """Take no more events, and write those there are."""
        self.is_open = False
        self._write(self._events)
        self._events = []

    def _write(self, events: list[list[Any]]) -> None:
        """Append a line for each event; a full disk costs the trace, not the run."""
        lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(lines)


@contextmanager
def clocks_compared(trace: Trace | None, socket: Socket, *, world_size: int) -> Iterator[None]:
    """Note how far the rank's clock is from rank 0's, before and after a block; without a trace do nothing.

    Collective: every rank must call, and none may be receiving from rank 0 by the tag of these messages.
    """
    if trace is not None:
        trace.note_clock(*compare_clocks(socket, world_size=world_size))
    yield
    if trace is not None:
        trace.note_clock(*compare_clocks(socket, world_size=world_size))


def compare_clocks(socket: Socket, *, world_size: int) -> tuple[int, int]:
    """How much later it is on rank 0's monotonic clock than on this rank's, and by how much that may be wrong.

    Rank 0 answers with its time; the best estimate is that it did so in the middle of the shortest round trip, and it
    was within half of it.

    Returns:
        Offset and largest error, nanoseconds; both 0 on rank 0.

    Cost: `_ROUNDS` round trips of 8 bytes between rank 0 and each other rank, in turn.
    """
    said = torch.zeros(1, dtype=torch.int64)
    if socket.rank == 0:
        for other in range(1, world_size):
            for _ in range(_ROUNDS):
                socket.recv(said, source=Rank(other), tag=_CLOCK)
                said[0] = time.monotonic_ns()
                socket.send(said, dest=Rank(other), tag=_CLOCK)
        return 0, 0
    found = []
    for _ in range(_ROUNDS):
        began = time.monotonic_ns()
        socket.send(said, dest=Rank(0), tag=_CLOCK)
        socket.recv(said, source=Rank(0), tag=_CLOCK)
        ended = time.monotonic_ns()
        found.append((ended - began, int(said.item()) - (began + ended) // 2))
    round_trip, offset = min(found)
    return offset, round_trip // 2 + 1


def open_trace(run_dir: Path, rank: Rank) -> Trace | None:
    """The trace that the run was asked for; None if it was not."""
    steps = os.environ.get(contract.ENV_TRACE_STEPS, "")
    return Trace(run_dir / contract.trace_file(rank), steps=int(steps)) if steps.isdecimal() else None
