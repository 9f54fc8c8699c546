"""Passes a decision of one rank on to others: whether training goes on, and by how much losses are scaled.

The state is a handful of numbers. The rank that knows the new one sends it along the flows that the recipe has anyway.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

_TAG = 30_020


class SharedState(Protocol):
    """A state that is the same on all ranks; `name` is the operation under which its messages are counted."""

    @property
    def is_on(self) -> bool: ...

    @property
    def name(self) -> str: ...

    def values(self) -> list[float]: ...

    def take(self, values: Sequence[float]) -> None: ...


def agree(
    ctx: Communicator, state: SharedState | None, *, source: Rank | None = None, dests: Sequence[Rank] = ()
) -> None:
    """Take the state of `source`, if one is given, and pass it on to `dests`.

    Args:
        ctx: The communicator of this rank.
        state: Nothing is sent if this is None or not on. The configuration decides whether, for all ranks alike.
        source: The rank that sends the new state; None: this rank knows it.
        dests: The ranks that call this with this rank as `source`, in the same step.

    Raises:
        CommunicationError: `source` sent more or fewer values than this rank's state has.

    Cost: one message to each of `dests`, of 8 bytes (float64) for each of the state's values.
    Order: from the rank that knows the state along the tree that `source` and `dests` make; nothing is added up.
    """
    if state is None or not state.is_on:
        return
    with operation(ctx, state.name):
        values = torch.tensor(state.values(), dtype=torch.float64)
        if source is not None:
            ctx.recv(values, source=source, tag=_TAG)
            state.take(values.tolist())
        for sending in [ctx.isend(values, dest=rank, tag=_TAG) for rank in dests]:
            sending.wait()
