"""Call what may block, such as a name look-up, an ssh agent or a key exchange, and return by a deadline."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_IDLE_S = 5.0


def time_left(end: float) -> float:
    """Seconds until `end` on the monotonic clock, never negative."""
    return max(0.0, end - time.monotonic())


def in_seconds(timeout_s: float) -> str:
    """A duration as text, rounded to 10 ms: what is left of a longer deadline has many digits."""
    return f"{round(timeout_s, 2):g} s"


def call_within(work: Callable[[], T], *, timeout_s: float, late: Callable[[T], None] | None = None) -> T:
    """Do `work` in a daemon thread of its own and return its result.

    Args:
        work: What may block.
        timeout_s: How long to wait for it.
        late: Called with what `work` returns after the deadline, such as a connection that must be closed.

    Raises:
        TimeoutError: If it has not returned in time.
        Exception: What `work` raised.
    """
    return Worker().call(work, timeout_s=timeout_s, late=late)


class Worker:
    """Does one thing after another in a thread that ends by itself when no more work comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[], T], *, timeout_s: float, late: Callable[[T], None] | None = None) -> T:
        """Do `work` as `call_within` does; after a `TimeoutError` the next call waits for this one to end."""
        answer: Future[T] = Future()

        def find() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread, whatever it is
                answer.set_exception(error)

        def take_late(_: "Future[T]") -> None:
            if late is not None and answer.exception() is None:
                late(answer.result())

        with self._lock:
            self._waiting.put(find)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            # Either `work` is not done yet, or it raised a TimeoutError itself. If it ended just now, the callback runs
            # at once, in this thread: whatever it made, such as a connection, is closed exactly once.
            answer.add_done_callback(take_late)
            raise

    def _run(self) -> None:
        while True:
            try:
                self._waiting.get(timeout=_IDLE_S)()
            except queue.Empty:
                # Looked at again under the lock that `call` holds while it queues work: no work can slip in between this
                # look and the thread's end.
                with self._lock:
                    if self._waiting.empty():
                        self._thread = None
                        return
