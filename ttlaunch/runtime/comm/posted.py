"""One rank's end of the messages of ranks that are threads of one process; their world takes each transfer and lets ranks wait."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar, cast

from torch import Tensor

from ttlaunch.runtime.comm.protocol import Pending
from ttlaunch.runtime.world import Rank

T = TypeVar("T", bound=Pending)


class TakesTransfers(Protocol[T]):
    """What knows all transfers of all ranks."""

    def post(self, tensor: Tensor, *, rank: Rank, peer: Rank, tag: int, is_send: bool) -> T:
        """Begin one side of a message."""

    def wait_any(self, transfers: Sequence[T], *, timeout_s: float | None) -> int | None:
        """Wait until a transfer is complete, and return its index; None after the timeout, as the world understands it."""


class PostedCommunicator(Generic[T]):
    """A `Communicator` whose world has the messages: a send returns when its world calls it complete."""

    def __init__(self, world: TakesTransfers[T], rank: Rank) -> None:
        self.rank = rank
        self._world = world

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        self.isend(tensor, dest=dest, tag=tag).wait()

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        self.irecv(tensor, source=source, tag=tag).wait()

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        return self._world.post(tensor, rank=self.rank, peer=dest, tag=tag, is_send=True)

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        return self._world.post(tensor, rank=self.rank, peer=source, tag=tag, is_send=False)

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        """Return the index of a complete transfer, of those that this communicator has begun; None after the timeout."""
        return self._world.wait_any(cast("Sequence[T]", pending), timeout_s=timeout_s)
