"""Let a SIGTERM end a command as Ctrl-C does, so that the processes it started are ended too."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """A SIGTERM raises KeyboardInterrupt in here."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
