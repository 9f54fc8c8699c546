"""The messages between two workers in one direction, and the lane that carries their frames; see `links.py`."""

import asyncio
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ttlaunch.runtime.comm.grpc.channels import Fence, Incoming, Outgoing, Transfer
from ttlaunch.runtime.comm.grpc.lanes import Lane
from ttlaunch.runtime.comm.protocol import CommunicationError

_End = TypeVar("_End", Outgoing, Incoming)


@dataclass(eq=False)
class Channel(Generic[_End]):
    """One end of the messages between two workers, and the state of its call and its lane.

    Attributes:
        is_awake: Whether the lane will look for frames anyway.
        lane: What frames go by; None while there is none.
        task: What keeps the call; None if there is none.
        writing: The transfer whose last frame is being sent.
        lost: Why no more messages pass in this epoch.
    """

    fence: Fence[_End]
    is_awake: bool = False
    lane: Lane | None = None
    task: "asyncio.Task[Any] | None" = None
    writing: Transfer | None = None
    lost: CommunicationError | None = None

    def fail(self, error: CommunicationError) -> None:
        """Fail all transfers, and those that will begin in this epoch."""
        self.lost = self.lost or error
        self.abandon(self.lost)

    def abandon(self, error: CommunicationError) -> None:
        """Fail all transfers; their tensors are neither read nor written any more."""
        if self.lane is not None:
            self.lane.keep_left()
        for transfer in [*self.fence.abandon(), *([self.writing] if self.writing else [])]:
            transfer.fail(error)

    def begin(self, epoch: int) -> None:
        self.fence.begin(epoch)
        self.lost = None

    def wake(self) -> None:
        """Look for frames to send; in the thread of the lanes."""
        if self.lane is not None:
            self.lane.pump()

    def close_lane(self) -> None:
        if self.lane is not None:
            self.lane.close()

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
