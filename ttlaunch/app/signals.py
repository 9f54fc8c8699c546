"""Set signal handlers for the time of a block."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def handled(by_number: Mapping[int, Callable[[int], None]]) -> Iterator[None]:
    """Handle signals with these functions within the block; a SIGHUP that is ignored already (`nohup`) stays ignored."""
    numbers = [n for n in by_number if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda taken, _: by_number[taken](taken)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def handled_as_usual(number: int) -> Iterator[None]:
    """Let a signal have its default effect within the block."""
    previous = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, previous)


@contextmanager
def interruptible(*numbers: signal.Signals) -> Iterator[None]:
    """Raise KeyboardInterrupt for these signals within the block, by default for SIGINT and SIGTERM.

    Outside such a block, Ctrl-C ends a command at once.
    """
    with handled(dict.fromkeys(numbers or (signal.SIGINT, signal.SIGTERM), _interrupt)):
        yield


def _interrupt(_number: int) -> NoReturn:
    raise KeyboardInterrupt
