"""What a worker of an elastic run reports to the coordinator: each event at once, and the last one again twice a second.

The coordinator takes numbers that grow for progress, so a worker whose threads live while its step hangs is late all the same.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from ttlaunch.membership.messages import Answered, Progressed, Registered
from ttlaunch.membership.reports import fields_of
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter

_BEAT_S = 0.5
_LONG_S = 600.0  # what may take long ends within this time: an import, a first step, a validation, a checkpoint
_PACES = 32  # the last ones count


class Reporter:
    """Writes the records of one worker; its thread ends with `close`.

    Attributes:
        micro_batches: How many it has differentiated.
        pulled_bytes: How many bytes of state it got from others.
        own_steps: Returns how many steps only its own weights have.
        has_stepped: Whether it has made a step; the first one of a process may take long.
        pauses: Whether it waits for the coordinator.
    """

    def __init__(self, write: Callable[..., object], traffic: TrafficCounter) -> None:
        """Report nothing yet; `write` writes a record, of the given fields."""
        self.micro_batches = self.pulled_bytes = 0
        self.own_steps: Callable[[], int] = int
        self.has_stepped = self.pauses = False
        self._write, self._traffic = write, traffic
        self._lock = threading.Lock()
        self._last: dict[str, object] = {}
        self._long = 0
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._closing = threading.Event()
        threading.Thread(target=self._repeat, name="reports", daemon=True).start()

    @property
    def pace_s(self) -> float | None:
        """Seconds that this worker needs for a micro-batch, without waits; None as long as it does not know."""
        return median(self._paces) if self._paces else None

    def report(self, event: Registered | Answered | Progressed) -> None:
        """Write an event, and repeat it until the next."""
        with self._lock:
            self._last = fields_of(event)
            self._write_last()

    def note_micro_batch(self, seconds: float) -> None:
        """Note that a micro-batch is done, and how long it took."""
        if self.micro_batches:  # the first one of a process takes longer
            self._paces.append(seconds)
        self.micro_batches += 1

    @contextmanager
    def long(self) -> Iterator[None]:
        """Ask for patience during a block that may take long."""
        self._long += 1
        try:
            yield
        finally:
            self._long -= 1

    def close(self) -> None:
        """Report nothing any more."""
        self._closing.set()

    def _repeat(self) -> None:
        while not self._closing.wait(_BEAT_S):
            with self._lock:
                if self._last:
                    self._write_last()

    def _write_last(self) -> None:
        is_long = self._long > 0 or not self.has_stepped
        self._write(
            **self._last,
            own_steps=self.own_steps(),
            counts=(self.micro_batches, self._traffic.sent_bytes, self.pulled_bytes),
            waits=self.pauses or self._traffic.is_waiting,
            limit_s=_LONG_S if is_long else None,
        )
