"""A socket that does nothing, so that what is measured around it is the telemetry alone."""

from torch import Tensor

from ttlaunch.runtime.comm.protocol import Pending
from ttlaunch.runtime.world import Rank


class NullCommunicator:
    """Takes every message and does nothing with it."""

    rank = Rank(0)

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Do nothing."""

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Do nothing."""

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:  # noqa: ARG002  nothing is done with it
        return self

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:  # noqa: ARG002  likewise
        return self

    def wait(self) -> None:
        """Do nothing."""
