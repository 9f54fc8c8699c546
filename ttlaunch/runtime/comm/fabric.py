"""Messages from device to device: torch.distributed's point-to-point messages, NCCL on CUDA devices, gloo in host memory.

The MPI communicator of the same ranks sets this transport up and carries each message's header, so a mismatch is reported as with
MPI. Planning checks which ranks may use it: the mesh graph needs a path of links between their meshes.

With NCCL, tensors in host memory, such as the losses of a validation, travel over MPI, and messages between
two ranks match in the order in which both began them. Tags only serve to report a mismatch; a message cannot overtake another one of
a different tag.
"""

import zlib
from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from ttlaunch.runtime.comm.mpi import MpiCommunicator
from ttlaunch.runtime.comm.protocol import (
    DTYPES,
    MAX_DIMS,
    CommunicationError,
    PeerLostError,
    Pending,
    check_sendable,
    described,
)
from ttlaunch.runtime.comm.torch_group import process_group
from ttlaunch.runtime.world import Rank, World

_HEADER_TAG = 20_000
"""What is added to the tag of a message to get the tag of its header."""


class FabricCommunicator:
    """Tensors between the ranks of a world, straight from device to device.

    Collective: every rank of the world must make one, and close it. Waiting ranks sleep.

    Cost: 1 message of the tensor's bytes, and one of 88 bytes over MPI.
    """

    def __init__(self, control: MpiCommunicator, *, world: World, device: torch.device) -> None:
        self.rank = control.rank
        self._control = control
        self._device = device
        self._roles = world.roles
        self._group = ExitStack()
        ranks = [Rank(rank) for rank in range(world.size)]
        self._group.enter_context(process_group(control, among=ranks, device=device))

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Send and wait."""
        self.isend(tensor, dest=dest, tag=tag).wait()

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Receive and wait.

        Raises:
            CommunicationError: The message has another dtype or shape.
        """
        self.irecv(tensor, source=source, tag=tag).wait()

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        check_sendable(tensor)
        if not self._is_carried(tensor, dest):
            return self._control.isend(tensor, dest=dest, tag=tag)
        header = self._control.isend(_header(tensor), dest=dest, tag=_HEADER_TAG + tag)
        body = dist.isend(_bytes_of(tensor), dest, tag=_body_tag(tensor, tag)) if tensor.numel() else None
        return _FabricTransfer(header, body, self._name(dest), tensor=tensor)

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        check_sendable(tensor)
        if not self._is_carried(tensor, source):
            return self._control.irecv(tensor, source=source, tag=tag)
        found = torch.empty_like(_header(tensor))
        header = self._control.irecv(found, source=source, tag=_HEADER_TAG + tag)
        body = dist.irecv(_bytes_of(tensor), source, tag=_body_tag(tensor, tag)) if tensor.numel() else None
        return _FabricTransfer(header, body, self._name(source), tensor=tensor, found=found)

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        """Return the first transfer whose header is complete; the backend's own threads move the rest of a message."""
        return self._control.wait_any(pending, timeout_s=timeout_s)

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        self._control.barrier()

    def close(self) -> None:
        """End the process group; call this after the wait for the last message. Collective."""
        self._group.close()

    def _is_carried(self, tensor: Tensor, peer: Rank) -> bool:
        """Return whether the backend carries the message; MPI does for this rank itself and, with NCCL, host memory."""
        return peer != self.rank and tensor.device.type == self._device.type

    def _name(self, peer: Rank) -> str:
        return f"rank {peer} ({self._roles[peer]})"


class _FabricTransfer:
    def __init__(
        self, header: Pending, body: dist.Work | None, peer: str, *, tensor: Tensor, found: Tensor | None = None
    ) -> None:
        self._header = header
        self._body = body
        self._peer = peer
        self._tensor = tensor  # read or written until the body has been waited for
        self._found = found

    def wait(self) -> None:
        self._header.wait()
        if self._found is not None and not torch.equal(_header(self._tensor), self._found):
            raise CommunicationError(f"{self._peer} sent {_described(self._found)}, expected {described(self._tensor)}")
        body, self._body = self._body, None
        if body is None:
            return
        try:
            body.wait()
        except RuntimeError as error:
            raise PeerLostError(f"{self._peer} is gone: {error}") from error

    def test(self) -> bool:
        """Return whether the header is complete; not every backend can tell this of the tensor's bytes."""
        return self._header.test()


def _header(tensor: Tensor) -> Tensor:
    shape = list(tensor.shape)
    return torch.tensor([DTYPES.index(tensor.dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))])


def _described(header: Tensor) -> str:
    dtype, dims, *shape = header.tolist()
    return f"{str(DTYPES[dtype]).removeprefix('torch.')} of shape {tuple(shape[:dims])}"


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as bytes, because no backend knows all dtypes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _body_tag(tensor: Tensor, tag: int) -> int:
    """Return the tag of the bytes. It differs by length, so a message never matches a receive that is too short."""
    return zlib.crc32(f"{tag} {tensor.nbytes}".encode()) >> 1
