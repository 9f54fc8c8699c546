"""Do the same work on many hosts at once, each host within a deadline; results come in the order in which hosts finish."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.transport import Transport

T = TypeVar("T")
MOST_AT_ONCE = 32


def on_each(
    transports: Sequence[Transport],
    work: Callable[[Transport], T],
    *,
    timeout_s: float,
    most_at_once: int = MOST_AT_ONCE,
) -> Iterator[tuple[Transport, T | HostError]]:
    """Do `work` for every host and give each answer as soon as it is there, errors of hosts as values.

    A host that has not answered within `timeout_s` from the start of its own work is given up with TIMED_OUT; its
    thread cannot keep the program alive. So one slow or dead host never delays the answers of the others, except that
    at most `most_at_once` are busy at a time.

    Raises:
        Exception: Whatever `work` raises that is no `HostError`: a bug, which must not look like a host's fault.
    """
    answers: queue.SimpleQueue[tuple[int, T | HostError | BaseException]] = queue.SimpleQueue()
    waiting = list(range(len(transports)))[::-1]
    deadlines: dict[int, float] = {}

    def attempt(index: int) -> None:
        try:
            answers.put((index, work(transports[index])))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, whatever it is
            answers.put((index, error))

    while waiting or deadlines:
        # A host's deadline starts with its own work, so hosts that wait for their turn lose no time.
        while waiting and len(deadlines) < most_at_once:
            index = waiting.pop()
            deadlines[index] = time.monotonic() + timeout_s
            threading.Thread(target=attempt, args=(index,), daemon=True).start()
        try:
            index, answer = answers.get(timeout=max(0.0, min(deadlines.values()) - time.monotonic()))
        except queue.Empty:
            index = min(deadlines, key=lambda late: deadlines[late])
            if deadlines[index] > time.monotonic():
                continue
            answer = HostError(transports[index].host, Trouble.TIMED_OUT, f"no answer within {timeout_s:g} s")
        if deadlines.pop(index, None) is None:
            continue  # it has been given up already
        if isinstance(answer, BaseException) and not isinstance(answer, HostError):
            raise answer
        yield transports[index], answer
