"""Measures the offset of a rank's clock from rank 0's with messages, so that timelines can be put side by side."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.telemetry.trace import Trace
from ttlaunch.runtime.world import Rank

_CLOCK = 30_020
_ROUNDS = 16


@contextmanager
def clocks_compared(trace: Trace | None, communicator: Communicator, *, world_size: int) -> Iterator[None]:
    """Note the offset of this rank's clock from rank 0's, before and after a block; without a trace do nothing.

    Args:
        trace: Where to note the offset; None on every rank if no timeline was requested.
        communicator: Every rank must call; no other message may use the tag `_CLOCK` meanwhile.
        world_size: The number of ranks.

    Cost: `compare_clocks`, twice.
    Order: rank 0 serves the others by rank.
    """
    if trace is not None:
        trace.note_clock(*compare_clocks(communicator, world_size=world_size))
    yield
    if trace is not None:
        trace.note_clock(*compare_clocks(communicator, world_size=world_size))


def compare_clocks(communicator: Communicator, *, world_size: int) -> tuple[int, int]:
    """Measure how far rank 0's monotonic clock is ahead of this rank's, and the largest possible error.

    Rank 0 answers with its time. The best estimate is that it did so in the middle of the shortest round trip, so the
    error is at most half of that trip.

    Args:
        communicator: Every rank must call.
        world_size: The number of ranks.

    Returns:
        Offset and largest error, nanoseconds; both 0 on rank 0.

    Cost: `_ROUNDS` round trips of 8 bytes (int64) between rank 0 and each other rank.
    Order: rank 0 serves the others by rank, one after the other.
    Source: F. Cristian, "Probabilistic Clock Synchronization", Distributed Computing 3, 1989.
    """
    time_of_0 = torch.zeros(1, dtype=torch.int64)
    if communicator.rank == 0:
        for other in range(1, world_size):
            for _ in range(_ROUNDS):
                communicator.recv(time_of_0, source=Rank(other), tag=_CLOCK)
                time_of_0[0] = time.monotonic_ns()
                communicator.send(time_of_0, dest=Rank(other), tag=_CLOCK)
        return 0, 0
    estimates = []
    for _ in range(_ROUNDS):
        began = time.monotonic_ns()
        communicator.send(time_of_0, dest=Rank(0), tag=_CLOCK)
        communicator.recv(time_of_0, source=Rank(0), tag=_CLOCK)
        ended = time.monotonic_ns()
        estimates.append((ended - began, int(time_of_0.item()) - (began + ended) // 2))
    round_trip, offset = min(estimates)
    return offset, round_trip // 2 + 1  # 1: both divisions round down
