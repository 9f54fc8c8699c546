"""What a worker of an elastic run reports to the coordinator: each event at once, and the last one again twice a second.

The coordinator takes numbers that grow for progress, so a worker whose threads live while its step hangs is late all the same.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median

from ttlaunch.membership.messages import Answered, CutOff, Progressed, Registered
from ttlaunch.membership.pulse import limit_for
from ttlaunch.membership.reports import fields_of
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter

_BEAT_S = 0.5
_LONG_S = 600.0  # what may take long ends within this time: an import, a first step, a validation, a checkpoint
_PACES = 32  # the last ones count


class Reporter:
    """Writes the records of one worker; its thread ends with `close`.

    Attributes:
        micro_batches: How many it has differentiated.
        given: How many bytes of state and of means each other worker has given it, by number.
        taken: How many whole states, and how many means, these were.
        own_steps: Returns how many steps only its own weights have.
        has_stepped: Whether it has made a step; the first one of a process may take long.
        pauses: Whether it waits for the coordinator.
        has_own_tasks: Whether it makes no step of the run but computes tasks, so that the time of a step says nothing about it.
        pace_s: Seconds that it needs for a micro-batch, without waits; None as long as it does not know.
    """

    def __init__(self, write: Callable[..., object], traffic: TrafficCounter) -> None:
        """Report nothing yet; `write` writes a record, of the given fields."""
        self.micro_batches = 0
        self.given: Mapping[int, int] = {}
        self.taken = (0, 0)
        self.own_steps: Callable[[], int] = int
        self.has_stepped = self.pauses = self.has_own_tasks = False
        self.pace_s: float | None = None
        self._write, self._traffic = write, traffic
        self._lock = threading.Lock()
        self._last: dict[str, object] = {}
        self._long = 0
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._closing = threading.Event()
        threading.Thread(target=self._repeat, name="reports", daemon=True).start()

    def report(self, event: Registered | Answered | Progressed | CutOff) -> None:
        """Write an event, and repeat it until the next."""
        with self._lock:
            self._last = fields_of(event)
            self._write_last()

    def note_micro_batch(self, seconds: float) -> None:
        """Note that a micro-batch is done, and how long it took."""
        if self.micro_batches:  # the first one of a process takes longer
            self._paces.append(seconds)
            self.pace_s = median(self._paces)
        self.micro_batches += 1

    def timed(self, indices: Iterable[int], *, check: Callable[[], object]) -> Iterator[int]:
        """Go through micro-batches, calling `check` before each, and note how long each takes without waits."""
        for index in indices:
            check()
            began, waited = time.monotonic_ns(), self._traffic.waited_ns
            yield index
            spent = time.monotonic_ns() - began - (self._traffic.waited_ns - waited)
            self.note_micro_batch(max(0, spent) / 1e9)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say in this block that the worker waits for the coordinator."""
        self.pauses = True
        try:
            yield
        finally:
            self.pauses = False

    def note_taken(self, given: Mapping[int, int], *, is_state: bool) -> None:
        """Note that a whole state or a mean has come, and how many bytes of it each other worker has given, by number."""
        numbers = {*self.given, *given}
        self.given = {number: self.given.get(number, 0) + given.get(number, 0) for number in numbers}
        states, means = self.taken
        self.taken = states + is_state, means + (not is_state)

    @contextmanager
    def long(self, announced: AbstractContextManager[object] | None = None) -> Iterator[None]:
        """Ask for patience during a block that may take long, in a context that announces it elsewhere, too."""
        self._long += 1
        try:
            with announced or nullcontext():
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
        given = self.given  # the role's thread replaces it
        self._write(
            **self._last,
            own_steps=self.own_steps(),
            **({"given": sorted(given.items()), "taken": self.taken} if given else {}),
            counts=(self.micro_batches, self._traffic.sent_bytes, sum(given.values())),
            waits=self.pauses or self._traffic.is_waiting,
            limit_s=self._limit_s(),
        )

    def _limit_s(self) -> float | None:
        """Return how long what this worker does now may take; None: as long as steps of the run say."""
        pace_s = self.pace_s  # the role's thread replaces it
        has_begun = pace_s is not None if self.has_own_tasks else self.has_stepped
        if self._long or not has_begun:
            return _LONG_S
        return limit_for(pace_s) if self.has_own_tasks and pace_s is not None else None
