"""How a rank waits for MPI: short waits at once, long ones asleep, since a rank that spins takes its core from one that computes."""

import os
import time
from collections.abc import Sequence

from mpi4py import MPI

from ttlaunch.runtime.comm.protocol import Pending

_TESTS = 200
_TESTS_IF_CROWDED = 20
_YIELDS = 200
_FIRST_SLEEP_S = 5e-5
_LONGEST_SLEEP_S = 1e-3


def wait_for(request: MPI.Request, crowded: bool) -> None:  # noqa: FBT001  hot path
    """Test until the request is complete.

    The first tests follow each other at once, for at most some fifty microseconds: an answer that is on its way comes
    sooner than the scheduler would give the core back. With a core for each rank the wait yields and stays quick. With
    fewer cores it soon sleeps, an eighth of the time waited so far, between 50 µs and 1 ms: a rank that spins would take
    its core from one that computes.
    """
    for _ in range(_TESTS_IF_CROWDED if crowded else _TESTS):
        if request.Test():
            return
    for _ in range(_YIELDS):
        if request.Test():
            return
        os.sched_yield()
    began = time.monotonic()
    while not request.Test():
        if crowded:
            _sleep(began)
        else:
            os.sched_yield()


def wait_for_any(pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
    """Test transfers in their order until one is complete, and say which; None once so much time is over.

    Such a wait is for whoever comes next, which may take as long as somebody's whole computation: it soon sleeps,
    however many cores there are.
    """
    began, looks = time.monotonic(), 0
    while True:
        for place, transfer in enumerate(pending):
            if transfer.test():
                return place
        if timeout_s is not None and time.monotonic() - began >= timeout_s:
            return None
        looks += 1
        if looks > _TESTS_IF_CROWDED:
            _sleep(began)


def _sleep(began: float) -> None:
    """An eighth of the time that was waited so far."""
    time.sleep(min(_LONGEST_SLEEP_S, max(_FIRST_SLEEP_S, (time.monotonic() - began) / 8)))
