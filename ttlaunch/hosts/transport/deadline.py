"""Call functions that may block, such as a name look-up or a key exchange, and stop waiting for them at a deadline."""

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")

_IDLE_S = 5.0


def time_left(deadline: float) -> float:
    """Seconds until `deadline` on the monotonic clock, never negative."""
    return max(0.0, deadline - time.monotonic())


def render_seconds(timeout_s: float) -> str:
    """Render a duration, rounded to 10 ms: the rest of a longer deadline would otherwise show many digits."""
    return f"{round(timeout_s, 2):g} s"


def call_within(work: Callable[[], T], *, timeout_s: float, on_late_result: Callable[[T], None] | None = None) -> T:
    """Run `work` in a daemon thread of its own and return its result.

    Args:
        work: The function that may block.
        timeout_s: How long to wait for its result.
        on_late_result: Called with a result that `work` returns after the deadline, such as a connection that must be closed.

    Raises:
        TimeoutError: If it has not returned in time.
        Exception: What `work` raised.
    """
    return DaemonCaller().call(work, timeout_s=timeout_s, on_late_result=on_late_result)


class DaemonCaller:
    """Runs functions one after another in a daemon thread, which ends after 5 s without work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[], T], *, timeout_s: float, on_late_result: Callable[[T], None] | None = None) -> T:
        """Run `work` as `call_within` does; after a `TimeoutError` the next call waits until this `work` has ended."""
        from concurrent.futures import Future  # noqa: PLC0415 - runs on this machine do without it

        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread, whatever it is
                future.set_exception(error)

        def take_late(_: "Future[T]") -> None:
            if on_late_result is not None and future.exception() is None:
                on_late_result(future.result())

        with self._lock:
            self._queue.put(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            # Either `work` has not ended yet, or it raised a TimeoutError itself. If it has ended in the meantime, the
            # callback runs at once, in this thread, so its result, such as a connection, is closed exactly once.
            future.add_done_callback(take_late)
            raise

    def _run(self) -> None:
        while True:
            try:
                self._queue.get(timeout=_IDLE_S)()
            except queue.Empty:
                # `call` holds this lock while it queues work, so nothing can be queued between this second check and
                # the end of the thread.
                with self._lock:
                    if self._queue.empty():
                        self._thread = None
                        return
