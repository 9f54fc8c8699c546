"""Calls that cannot outlive a deadline, for libraries that may block: name look-ups, ssh agents, key exchanges."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_IDLE_S = 5.0


def time_left(end: float) -> float:
    """Seconds until `end` on the monotonic clock, never negative."""
    return max(0.0, end - time.monotonic())


def in_seconds(timeout_s: float) -> str:
    """A deadline in words; what is left of a longer one is not shown to the nanosecond."""
    return f"{round(timeout_s, 2):g} s"


def call_within(work: Callable[[], T], *, timeout_s: float, late: Callable[[T], None] | None = None) -> T:
    """Do `work` in a thread of its own, which cannot keep the program alive.

    Args:
        work: What may block.
        timeout_s: How long to wait for it.
        late: Takes what `work` returns after it has been given up, such as a connection that must be closed.

    Raises:
        TimeoutError: If it has not returned in time.
        Exception: What `work` raised.
    """
    return Worker().call(work, timeout_s=timeout_s, late=late)


class Worker:
    """Does one thing after another in a thread that ends by itself when nothing comes any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[], T], *, timeout_s: float, late: Callable[[T], None] | None = None) -> T:
        """As `call_within`; after a `TimeoutError` the next call waits for this one to end."""
        answer = _Answer(work, late)
        with self._lock:
            self._waiting.put(answer.find)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
        return answer.get(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                self._waiting.get(timeout=_IDLE_S)()
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._thread = None
                        return


class _Answer(Generic[T]):
    """What one piece of work returned or raised, or that nobody waits for it any more."""

    def __init__(self, work: Callable[[], T], late: Callable[[T], None] | None) -> None:
        self._work = work
        self._late = late
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._given_up = False
        self._value: T
        self._error: BaseException | None = None

    def find(self) -> None:
        error: BaseException | None = None
        try:
            value = self._work()
        except BaseException as raised:  # noqa: BLE001 - handed to the caller's thread, whatever it is
            error = raised
        with self._lock:
            self._error = error
            if error is None:
                self._value = value
            self._done.set()
            too_late = self._given_up and error is None
        if too_late and self._late is not None:
            self._late(value)

    def get(self, timeout_s: float) -> T:
        if not self._done.wait(timeout_s):
            with self._lock:
                if not self._done.is_set():
                    self._given_up = True
                    raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value
