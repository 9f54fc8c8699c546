"""Enters what a rank does with the groups of `torch.distributed` into its flight recorder, with the user's line.

Only the outermost call counts: of an `all_gather_object`, the `all_gather` that it consists of is not entered.
"""

from __future__ import annotations

import _thread
import os
import sys
import time
import weakref
from pathlib import Path

from ttlaunch import contract
from ttlaunch.flight_recorder import GROUP, NOBODY, SKIPPED, WORLD
from ttlaunch.flight_recorder_writer import FlightRecorder
from ttlaunch.rank_exceptions.outline import is_own_file

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any

    from ttlaunch.flight_recorder_writer import Label, Place


class GroupRecords:
    """The records of one rank; nothing is recorded before `open`.

    Attributes:
        is_open: Whether operations are recorded.

    Cost: 2 to 4 µs for an operation, most of it to find the user's line; no message and no system call.
    """

    def __init__(self, scratch: str, *, rank: int, world_size: int) -> None:
        """Note where the recorder is to be; `scratch` is the run's folder in shared memory."""
        self._scratch = scratch
        self._rank = rank
        self._world_size = world_size
        self._recorder: FlightRecorder | None = None
        self._pid = os.getpid()
        # The backward pass of an accelerator runs in another thread than the script, and the recorder knows only one writer.
        self._lock = _thread.allocate_lock()
        self._tags: dict[Any, int] = {}
        self._inside = 0  # the thread that is in a recorded call
        self._broken = 0  # the entry of an operation that ended by an exception
        self._works: dict[int, tuple[Any, Callable[[], int]]] = {}
        self._own: dict[str, bool] = {}
        self.is_open = False

    def open(self) -> None:
        """Make the recorder of this rank; a process that the rank has forked, or a rank without room for it, records nothing."""
        if self._recorder is None and os.getpid() == self._pid:
            path = Path(self._scratch, contract.recorder_file(self._rank))
            self._recorder = FlightRecorder(path, rank=self._rank)
            self._recorder.join_group()
        self.is_open = self._recorder is not None

    def close(self) -> None:
        """Record nothing more."""
        self.is_open = False

    def is_world(self, rank: int, world_size: int) -> bool:
        """Whether torch gives the ranks the numbers that ttlaunch gives them; else nothing can be said about them."""
        return (rank, world_size) == (self._rank, self._world_size)

    def records_now(self) -> bool:
        """Whether a call is to be recorded: it is not part of another one that is recorded."""
        return self.is_open and self._inside != _thread.get_ident()

    def join(self, group: Any, ranks: Sequence[int]) -> int:
        """Note the ranks of a group, and return the tag of its operations."""
        tag = self._tags.get(group)
        if tag is None:
            tag = WORLD
            if self._recorder is not None and len(ranks) < self._world_size:
                with self._lock:
                    tag = self._recorder.join_group(ranks)
            self._tags[group] = tag
        return tag

    def tag_of(self, group: Any) -> int | None:
        """Return the tag of a group's operations; None if the group is not known."""
        return WORLD if group is None else self._tags.get(group)

    def forget_groups(self) -> None:
        """Keep no group alive that the script destroys."""
        self._tags.clear()

    def begin(self, verb: int, label: Label, *, peer: int = GROUP, tag: int, size: int = 0, message: int = 0) -> int:
        """Enter an operation that begins, and return the offset of its entry; see `FlightRecorder.begin`."""
        recorder = self._recorder
        if recorder is None:
            return 0
        try:
            place = self.place()
            with self._lock:
                if self._broken:
                    recorder.end(self._broken, time.monotonic_ns())
                    self._broken = 0
                return recorder.begin(
                    verb, label, place, peer=peer, tag=tag, size=size, now=time.monotonic_ns(), message=message
                )
        except Exception:  # noqa: BLE001 - such as a tag that the format has no room for; the script goes on without records
            self.close()
            return 0

    def end(self, offset: int) -> None:
        """Enter that an operation has ended."""
        if self._recorder is not None and offset:
            self._recorder.end(offset, time.monotonic_ns())

    def begin_wait(self, offset: int) -> None:
        """Enter that the rank now waits for an operation that it had begun in the background."""
        if self._recorder is not None and offset:
            self._recorder.begin_wait(offset)

    def enter(self) -> None:
        """Note that this thread is in a recorded call."""
        self._inside = _thread.get_ident()

    def leave(self, broken: int = 0) -> None:
        """Note that this thread has left its call; the entry of one that raised stays open until the next one begins."""
        self._inside = 0
        self._broken = broken

    @property
    def message(self) -> int:
        """The number, in its channel, of the message that was entered last."""
        return 0 if self._recorder is None else self._recorder.message

    def skipped(self, name: str, place: Place | None) -> None:
        """Enter that the rank has left out something that was to follow on what it did at a place."""
        if self._recorder is not None:
            with self._lock:
                now = time.monotonic_ns()
                offset = self._recorder.begin(
                    SKIPPED, (name, None), place, peer=NOBODY, tag=WORLD, size=0, now=now, message=1
                )
                self._recorder.end(offset, now)

    def watch_work(self, work: Any, offset: int, *, begin_wait: Callable[[], int] | None = None) -> None:
        """Have the wait for a work entered, and its end; one that nobody waits for ends when the script drops it.

        Args:
            work: What torch returned for an operation in the background; None if it has no handle of its own.
            offset: The entry of the operation.
            begin_wait: Enters the begin of the wait and returns the entry to end; None: the wait is part of the operation.
        """
        if work is None:
            self.end(offset)
            return
        key = id(work)

        def waits() -> int:
            self.begin_wait(offset)
            return offset

        def dropped(_: object) -> None:
            if self._works.pop(key, None) is not None:
                self.end(offset)

        self._works[key] = weakref.ref(work, dropped), begin_wait or waits

    def begin_waiting_for(self, work: object) -> int:
        """Enter that the rank waits for a work, and return the entry to end; 0 if the work is not recorded."""
        known = self._works.pop(id(work), None)
        return 0 if known is None else known[1]()

    def place(self) -> Place | None:
        """Return the innermost line of the user's own code that has led to this call."""
        own = self._own
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
        while frame is not None:
            file = frame.f_code.co_filename
            is_own = own.get(file)
            if is_own is None:
                is_own = own[file] = is_own_file(file)
            if is_own:
                return file, frame.f_lineno
            frame = frame.f_back
        return None
