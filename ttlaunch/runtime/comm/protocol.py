"""How ranks exchange tensors; `multihost_config.socket_type` chooses the transport behind it."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ttlaunch.errors import TtlaunchError
from ttlaunch.runtime.world import Rank

ENV_SYNCHRONOUS_SENDS = "TTLAUNCH_SYNCHRONOUS_SENDS"
"""If 1, a send completes only when its receive has begun, so that in tests every possible deadlock occurs."""


class CommunicationError(TtlaunchError):
    """What a peer sent is not what this rank expects, or the transport gave up."""


class PeerLostError(CommunicationError):
    """The rank at the other end has ended; the launcher reports that rank's failure instead of this rank's."""


class EpochOverError(CommunicationError):
    """The members of the run change; what was under way among the members before has ended."""


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the buffer may be used again; a receive raises `CommunicationError` if the message does not fit."""

    def test(self) -> bool:
        """Return whether `wait()` would return at once, as far as is known; the call also advances the transfer."""


class Communicator(Protocol):
    """Point-to-point messages between the ranks of one run; what several ranks do together is in `collectives.py`.

    Tensors are contiguous. A receive must be given the dtype and the shape that were sent. Every method raises
    `ValueError`, before anything is sent, for a tensor that cannot be sent.

    Cost: a message has the bytes of its tensor; the class of each transport states what the transport adds.
    Order: messages with equal source, destination and tag arrive in the order in which they were sent, and receives
        match them in the order in which they were posted.
    """

    @property
    def rank(self) -> Rank:
        """The rank that this communicator belongs to."""

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Send; may or may not return before the peer has received."""

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Fill `tensor` with the next message of `source`."""

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        """Begin to send; `tensor` must not change before `wait()` has returned."""

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        """Begin to receive; `tensor` holds the message when `wait()` has returned."""

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        """Sleep until one of several transfers of this communicator needs nothing more from its peer; call its `wait()` next.

        Args:
            pending: The transfers, at least one, all with the same tag; if several are complete, the first is chosen.
            timeout_s: Seconds after which to give up; 0 only tests the transfers; None waits without limit.

        Returns:
            The index of that transfer in `pending`; None after `timeout_s`.
        """


MAX_DIMS = 8
"""The most dimensions of a tensor that can be sent."""

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""The types of a tensor that can be sent; a header holds the index of one."""


def check_sendable(tensor: Tensor) -> None:
    """Refuse a tensor that no transport carries.

    Raises:
        ValueError: The tensor is not contiguous, or has a dtype or a number of dimensions that a header cannot name.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous and cannot be sent or received")
    if tensor.dim() > MAX_DIMS:
        raise ValueError(f"a tensor of {tensor.dim()} dimensions cannot be sent; at most {MAX_DIMS} fit the header")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"a tensor of {tensor.dtype} cannot be sent")


def described(tensor: Tensor) -> str:
    """Describe a dtype and shape, such as `float32 of shape (3,)`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have the same bits; NaN equals itself here."""
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
