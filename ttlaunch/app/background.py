"""Do something while the command goes on, without ever keeping it from leaving."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def in_background(work: Callable[[], _T]) -> Future[_T]:
    """Start some work whose thread cannot keep the program alive."""
    future: Future[_T] = Future()

    def attempt() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    return future
