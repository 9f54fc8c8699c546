"""Reports what a worker of an elastic run uses of its host, every few seconds, so that others see it wherever the worker runs."""

import contextlib
import threading
import time
from collections.abc import Callable

from ttlaunch.runtime.resident import resident_bytes

_EVERY_S, _LATER_EVERY_S, _SOON = 2.0, 10.0, 60  # seconds between two records, and between those after the first ones


class UsageReports:
    """Writes a record of usage every few seconds, in a thread of its own, until it is closed."""

    def __init__(self, write: Callable[..., object]) -> None:
        """Begin; `write` writes a record of usage, of the given fields."""
        self._write = write
        self._closing = threading.Event()
        threading.Thread(target=self._repeat, name="usage", daemon=True).start()

    def close(self) -> None:
        """Write nothing any more."""
        self._closing.set()

    def _repeat(self) -> None:
        before, records = (time.monotonic(), time.process_time()), 0
        while not self._closing.wait(_EVERY_S if records < _SOON else _LATER_EVERY_S):
            now = time.monotonic(), time.process_time()
            passed = max(now[0] - before[0], 1e-3)
            percent = round(100 * max(0.0, now[1] - before[1]) / passed)
            before, records = now, records + 1
            with contextlib.suppress(OSError):  # a full disk, which others report
                self._write(cpu_percent=percent, memory_bytes=resident_bytes(), count=1)
