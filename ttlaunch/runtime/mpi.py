"""Sockets over MPI: raw bytes between buffers, never pickled objects, and waits that leave the core to who computes.

A message is a small header (dtype, shape) and the bytes of the tensor, so that a receiver can name a mismatch instead
of misreading the bytes. Open MPI busy-waits in its blocking calls, hence none is used here once the world is up.
"""

import os
import time
from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from ttlaunch.runtime.sockets import Pending, SocketError
from ttlaunch.runtime.world import Rank, World

ENV_SYNCHRONOUS_SENDS = "TTLAUNCH_SYNCHRONOUS_SENDS"
"""Set to 1, a send completes only when its receive has begun: for tests, where it turns a possible deadlock into one."""

CHUNK_BYTES = 2**30
"""Counts are 32-bit integers in many MPI libraries; larger tensors travel in several messages."""

_HEADER_WORDS = 10
_MAX_DIMS = _HEADER_WORDS - 2
_DTYPES = (
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
_YIELDS = 200
_FIRST_SLEEP_S = 5e-5
_LONGEST_SLEEP_S = 1e-3


class MpiSocket:
    """Tensors between the ranks of a world, over a communicator of its own.

    Collective: every rank of `comm` must make one, in the same order. CUDA tensors travel through host memory.
    """

    def __init__(self, comm: MPI.Intracomm, *, world: World, rank: Rank) -> None:
        self.rank = rank
        self._comm = comm.Dup()
        self._world = world
        self._crowded = world.is_crowded(rank)
        self._start = self._comm.Issend if os.environ.get(ENV_SYNCHRONOUS_SENDS) == "1" else self._comm.Isend

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Send and wait. Cost: 1 message of the tensor's bytes and one of 80 bytes."""
        self.isend(tensor, dest=dest, tag=tag).wait()

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Receive and wait.

        Raises:
            SocketError: The message has another dtype or shape.
        """
        self.irecv(tensor, source=source, tag=tag).wait()

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        host = _on_host(tensor)
        header = _header(tensor)
        buffers = [_bytes_of(header), *_chunks(host)]
        requests = [self._start([buffer, MPI.BYTE], dest, tag) for buffer in buffers]
        return _Send(requests, crowded=self._crowded, kept=(header, host))

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        host = _on_host(tensor)
        header = torch.empty(_HEADER_WORDS, dtype=torch.int64)
        first = self._comm.Irecv([_bytes_of(header), MPI.BYTE], source, tag)
        rest = [self._comm.Irecv([buffer, MPI.BYTE], source, tag) for buffer in _chunks(host)]
        peer = f"rank {source} ({self._world.roles[source]})"
        return _Receive(first, rest, crowded=self._crowded, header=header, host=host, tensor=tensor, peer=peer)

    def barrier(self) -> None:
        """Wait for every rank, asleep where ranks outnumber cores. Collective."""
        wait_all([self._comm.Ibarrier()], crowded=self._crowded)


class _Send:
    def __init__(self, requests: Sequence[MPI.Request], *, crowded: bool, kept: object) -> None:
        self._requests = requests
        self._crowded = crowded
        self._kept = kept  # MPI reads these buffers until the requests are complete

    def wait(self) -> None:
        wait_all(self._requests, crowded=self._crowded)


class _Receive:
    def __init__(
        self,
        first: MPI.Request,
        rest: Sequence[MPI.Request],
        *,
        crowded: bool,
        header: Tensor,
        host: Tensor,
        tensor: Tensor,
        peer: str,
    ) -> None:
        self._first = first
        self._rest = rest
        self._crowded = crowded
        self._header = header
        self._host = host
        self._tensor = tensor
        self._peer = peer

    def wait(self) -> None:
        wait_all([self._first], crowded=self._crowded)
        if not torch.equal(self._header, _header(self._tensor)):
            raise SocketError(
                f"{self._peer} sent {_described(self._header)}, expected {_described(_header(self._tensor))}"
            )
        wait_all(self._rest, crowded=self._crowded)
        if self._tensor.device.type != "cpu":
            self._tensor.detach().copy_(self._host)


def wait_all(requests: Sequence[MPI.Request], *, crowded: bool) -> None:
    """Test until all requests are complete.

    With a core for each rank the wait yields and stays quick. With fewer cores it soon sleeps, an eighth of the time
    waited so far, between 50 µs and 1 ms: a rank that spins would take its core from one that computes.
    """
    requests = list(requests)
    for _ in range(_YIELDS):
        if MPI.Request.Testall(requests):
            return
        os.sched_yield()
    began = time.monotonic()
    while not MPI.Request.Testall(requests):
        if crowded:
            time.sleep(min(_LONGEST_SLEEP_S, max(_FIRST_SLEEP_S, (time.monotonic() - began) / 8)))
        else:
            os.sched_yield()


def _on_host(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it in host memory if it lives on a device."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous and cannot be sent or received")
    if tensor.dim() > _MAX_DIMS:
        raise ValueError(f"a tensor of {tensor.dim()} dimensions cannot be sent; at most {_MAX_DIMS} fit the header")
    return tensor.detach() if tensor.device.type == "cpu" else tensor.detach().cpu()


def _header(tensor: Tensor) -> Tensor:
    shape = list(tensor.shape)
    return torch.tensor([_DTYPES.index(tensor.dtype), len(shape), *shape, *[0] * (_MAX_DIMS - len(shape))])


def _described(header: Tensor) -> str:
    dtype, dims, *shape = header.tolist()
    return f"{str(_DTYPES[dtype]).removeprefix('torch.')} of shape {tuple(shape[:dims])}"


def _bytes_of(tensor: Tensor) -> MPI.memory:
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _chunks(tensor: Tensor) -> list[MPI.memory]:
    whole = tensor.numel() * tensor.element_size()
    address = tensor.data_ptr()
    return [
        MPI.memory.fromaddress(address + offset, min(CHUNK_BYTES, whole - offset))
        for offset in range(0, whole, CHUNK_BYTES)
    ]
