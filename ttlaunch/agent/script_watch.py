"""What a shim reports of a script's rank while it runs: the numbers that it prints, and what its processes use of the host.

Both go into the rank's progress, a few lines a second at most. A thread of the shim does the work, so copying the output never
waits for it. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque

from ttlaunch import contract

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ttlaunch.agent.gpu_usage import GpuMeter

_GPU_DRIVER = "/dev/nvidiactl"
_LOOK_S = 1.0
_USAGE_EVERY, _LATER_EVERY, _SOON = (
    2,
    5,
    60,
)  # looks between two records of usage, and of the records after the first ones
_MOST_HELD = 65_536  # bytes of a stream between two looks; of more, the newest whole lines count
_MOST_LINES = 100  # with numbers, between two looks; of more, the newest
_MOST_NAMES = 64  # of numbers, in a run
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class ScriptWatch:
    """Watches one rank until `finish`."""

    def __init__(self, run_folder: str, rank: int) -> None:
        """Begin; this process has just started the rank."""
        self._progress = os.path.join(run_folder, contract.progress_file(rank))
        self._heard = {1: _Heard(), 2: _Heard()}
        self._names: set[str] = set()
        self._is_over = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def hear(self, descriptor: int, data: bytes) -> None:
        """Take what the rank has written to one of its streams; called by the thread that copies this stream."""
        self._heard[descriptor].add(data)

    def finish(self, *, within_s: float) -> None:
        """Report the numbers that have not been reported yet; the rank has ended."""
        self._is_over.set()
        self._thread.join(within_s)
        if not self._thread.is_alive():
            self._report_printed(is_over=True)

    def _watch(self) -> None:
        usage = UsageMeter(os.getpid(), began=self._began, has_gpus=os.path.exists(_GPU_DRIVER))
        looks = records = 0
        while not self._is_over.wait(_LOOK_S):
            self._report_printed()
            looks += 1
            if looks == 1 or looks % (_USAGE_EVERY if records < _SOON else _LATER_EVERY) == 0:
                records += 1
                contract.append_progress(
                    self._progress, {"kind": contract.KIND_USAGE, "time": time.time(), **usage.take()}
                )

    def _report_printed(self, *, is_over: bool = False) -> None:
        from ttlaunch.records.printed import LONGEST_LINE, read_printed  # noqa: PLC0415 - the rank's start does not wait for it

        found: deque[dict[str, Any]] = deque(maxlen=_MOST_LINES)
        for heard in self._heard.values():
            for when, line in heard.lines(LONGEST_LINE, is_over=is_over):
                step, values = read_printed(line)
                known = {name: value for name, value in values.items() if self._is_known(name)}
                if known or step is not None:
                    named = {} if step is None else {"step": step}
                    found.append({"kind": contract.KIND_PRINTED, "time": when, **named, "values": known})
        if found:
            contract.append_progress(self._progress, *sorted(found, key=lambda record: record["time"]))

    def _is_known(self, name: str) -> bool:
        """Whether a name is among the first of this rank; a script may make up a new name in every line."""
        if len(self._names) < _MOST_NAMES:
            self._names.add(name)
        return name in self._names


class _Heard:
    """What a rank has written to one stream since the last look, in pieces with their times."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: list[tuple[float, bytes]] = []
        self._size = 0
        self._has_gap = self._is_cut = False
        self._rest = b""

    def add(self, data: bytes) -> None:
        data = data.replace(b"\r", b"\n")
        with self._lock:
            if self._size + len(data) > _MOST_HELD:
                self._pieces, self._size, self._has_gap, self._is_cut = [], 0, True, True
            if self._is_cut:  # begin again after a line end: half a line could have half a number
                _, line_end, data = data.partition(b"\n")
                self._is_cut = not line_end
            self._pieces.append((time.time(), data))
            self._size += len(data)

    def lines(self, longest: int, *, is_over: bool) -> Iterator[tuple[float, bytes]]:
        """Yield the whole lines and states of progress bars, at most a little more than `longest` bytes of each."""
        with self._lock:
            pieces, self._pieces, self._size = self._pieces, [], 0
            if self._has_gap:
                self._rest, self._has_gap = b"", False
        when = time.time()
        for when, data in pieces:
            *lines, rest = (self._rest + data).split(b"\n")
            self._rest = rest[: longest + 1]
            for line in lines:
                yield when, line
        if is_over and self._rest:
            yield when, self._rest
            self._rest = b""


class UsageMeter:
    """Measures what the descendants of a process use of this host."""

    def __init__(self, pid: int, *, began: float, has_gpus: bool = False) -> None:
        self._pid = pid
        self._before = began, 0
        self._gpus: GpuMeter | None = None
        if has_gpus:
            from ttlaunch.agent.gpu_usage import gpu_meter  # noqa: PLC0415 - only machines with a driver pay for it

            self._gpus = gpu_meter()

    def take(self) -> dict[str, int]:
        """Return the fields of `records.ranks.Usage` but its time; processor time counts since the last call."""
        from ttlaunch.agent.run_processes import tree_below  # noqa: PLC0415 - as above

        ticks = pages = number = 0
        pids = tree_below(self._pid)
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended meanwhile
                fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
                pages += int(_read(f"/proc/{pid}/statm").split()[1])
                # With the time of its children that have ended and that it has waited for, so that none is lost.
                ticks += sum(map(int, fields[11:15]))
                number += 1
        now, (then, ticks_then) = time.monotonic(), self._before
        self._before = now, ticks
        share = max(0, ticks - ticks_then) / _TICKS / max(now - then, 1e-3)
        gpus = self._gpus.take(pids) if self._gpus else {}
        return {"cpu_percent": round(100 * share), "memory_bytes": pages * _PAGE, "count": number, **gpus}


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_HELD)
    finally:
        os.close(descriptor)
