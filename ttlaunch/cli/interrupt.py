"""Let Ctrl-C, and a SIGTERM too, be something that a command can answer: it ends what it started and says how far it came."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def interruptible(*numbers: signal.Signals) -> Iterator[None]:
    """A signal raises KeyboardInterrupt in here; elsewhere Ctrl-C leaves the command at once.

    Args:
        numbers: Which; without any, SIGINT and SIGTERM.
    """
    previous = {number: signal.signal(number, _interrupt) for number in numbers or (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
