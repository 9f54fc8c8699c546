"""How ranks exchange tensors; the transport behind it is chosen by `multihost_config.socket_type`."""

from typing import Protocol

from torch import Tensor

from ttlaunch.errors import TtlaunchError
from ttlaunch.runtime.world import Rank


class SocketError(TtlaunchError):
    """What a peer sent is not what this rank expects, or the transport gave up."""


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the buffer may be used again; a receive raises `SocketError` if the message does not fit."""


class Socket(Protocol):
    """Point-to-point messages between the ranks of one run.

    Tensors are contiguous. A receive must be given the dtype and the shape that were sent. Messages with equal
    source, destination and tag arrive in the order in which they were sent, and receives match them in the order in
    which they were posted.
    """

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Send; may or may not return before the peer has received."""

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Fill `tensor` with the next message of `source`."""

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        """Begin to send; `tensor` must not change before `wait()` has returned."""

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        """Begin to receive; `tensor` holds the message when `wait()` has returned."""
