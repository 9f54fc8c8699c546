"""Sockets over MPI: raw bytes between buffers, never pickled objects, and waits that leave the core to who computes.

Every message begins with a header (dtype, shape), so that a receiver can name a mismatch instead of misreading the bytes.
A small tensor travels behind its header in one message, at the price of a copy on both sides; a large one follows in
messages of its own, straight from buffer to buffer. Open MPI busy-waits in its blocking calls, hence none is used here
once the world is up.
"""

import os
import struct
import time

import torch
from mpi4py import MPI
from torch import Tensor

from ttlaunch.runtime.sockets import DTYPES, MAX_DIMS, Pending, SocketError, check_sendable, described
from ttlaunch.runtime.world import Rank, World

ENV_SYNCHRONOUS_SENDS = "TTLAUNCH_SYNCHRONOUS_SENDS"
"""Set to 1, a send completes only when its receive has begun: for tests, where it turns a possible deadlock into one."""

CHUNK_BYTES = 2**30
"""Counts are 32-bit integers in many MPI libraries; larger tensors travel in several messages."""

INLINE_BYTES = 2**14
"""Up to here a copy costs less than a second message."""

_HEADER = struct.Struct(f"={2 + MAX_DIMS}q")
_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(DTYPES)}
_TESTS = 200
_TESTS_IF_CROWDED = 20
_YIELDS = 200
_MOST_LAYOUTS = 4096
_FIRST_SLEEP_S = 5e-5
_LONGEST_SLEEP_S = 1e-3


class MpiSocket:
    """Tensors between the ranks of a world, over a communicator of its own.

    Collective: every rank of `comm` must make one, in the same order. CUDA tensors travel through host memory.

    Cost: 1 message of 80 bytes and the tensor's up to `INLINE_BYTES`; above, one of 80 bytes and one for each
    `CHUNK_BYTES` of the tensor.
    """

    def __init__(self, comm: MPI.Intracomm, *, world: World, rank: Rank) -> None:
        self.rank = rank
        self._comm = comm.Dup()
        self._peers = [f"rank {peer} ({role})" for peer, role in enumerate(world.roles)]
        self._crowded = world.is_crowded(rank)
        self._start = self._comm.Issend if os.environ.get(ENV_SYNCHRONOUS_SENDS) == "1" else self._comm.Isend
        self._layouts: dict[tuple[int, torch.dtype, torch.Size], _Layout] = {}
        self._boxes: list[_Box] = []

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Send and wait."""
        layout = self._layout(tensor) if tensor.is_cpu else None
        if layout is None or layout.chunks:
            self.isend(tensor, dest=dest, tag=tag).wait()
            return
        box = layout.boxes.pop() if layout.boxes else layout.box()
        box.payload[:] = layout.view
        _wait(self._start(box.spec, dest, tag), crowded=self._crowded)
        layout.boxes.append(box)

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Receive and wait.

        Raises:
            SocketError: The message has another dtype or shape.
        """
        layout = self._layout(tensor) if tensor.is_cpu else None
        if layout is None or layout.chunks:
            self.irecv(tensor, source=source, tag=tag).wait()
            return
        box = self._boxes.pop() if self._boxes else _Box(b"", INLINE_BYTES)
        _wait(self._comm.Irecv(box.spec, source, tag), crowded=self._crowded)
        if not box.data.startswith(layout.header):
            raise self._mismatch(box, source=source, tensor=tensor)
        layout.view[:] = box.payload[: layout.size]
        self._boxes.append(box)

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        host = tensor if tensor.is_cpu else tensor.detach().cpu()
        layout = self._layout(host)
        if layout.chunks:
            requests = [self._start(spec, dest, tag) for spec in (layout.header_spec, *layout.chunks)]
            return _Send(requests, self._crowded, host)
        box = layout.boxes.pop() if layout.boxes else layout.box()
        box.payload[:] = layout.view
        return _InlineSend(self._start(box.spec, dest, tag), self._crowded, layout.boxes, box)

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        host = tensor if tensor.is_cpu else tensor.detach().cpu()
        layout = self._layout(host)
        box = self._boxes.pop() if self._boxes else _Box(b"", INLINE_BYTES)
        requests = [self._comm.Irecv(spec, source, tag) for spec in (box.spec, *layout.chunks)]
        return _Receive(self, requests, layout, box, tensor, host, source)

    def barrier(self) -> None:
        """Wait for every rank, asleep where ranks outnumber cores. Collective."""
        wait_all([self._comm.Ibarrier()], crowded=self._crowded)

    def close(self) -> None:
        """Nothing is left to do: MPI frees what it has when the world ends."""

    def _layout(self, host: Tensor) -> "_Layout":
        """What is known of buffers like this one; they come back in every step."""
        key = (host.data_ptr(), host.dtype, host.shape)
        layout = self._layouts.get(key)
        if layout is None or not host.is_contiguous():
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = _Layout(host)
        return layout

    def _mismatch(self, box: "_Box", *, source: Rank, tensor: Tensor) -> SocketError:
        sent = _described(bytes(box.data[: _HEADER.size]))
        return SocketError(f"{self._peers[source]} sent {sent}, expected {described(tensor)}")

    def accept(self, receive: "_Receive") -> None:
        """Complete a receive whose requests have been posted."""
        layout, box, tensor = receive.layout, receive.box, receive.tensor
        first, *rest = receive.requests
        _wait(first, crowded=self._crowded)
        if not box.data.startswith(layout.header):
            for request in rest:
                request.Cancel()
            raise self._mismatch(box, source=receive.source, tensor=tensor)
        if rest:
            wait_all(rest, crowded=self._crowded)
        else:
            layout.view[:] = box.payload[: layout.size]
        self._boxes.append(box)
        if not tensor.is_cpu:
            tensor.detach().copy_(receive.host)


class _Box:
    """Room for a header and a small tensor behind it."""

    def __init__(self, header: bytes, size: int) -> None:
        self.data = bytearray(_HEADER.size + size)
        self.data[: len(header)] = header
        self.payload = memoryview(self.data)[_HEADER.size :]
        self.spec = [MPI.memory.frombuffer(self.data), MPI.BYTE]


class _Layout:
    """How a buffer travels; holds its address but not its memory, and is looked up by address, dtype and shape."""

    def __init__(self, host: Tensor) -> None:
        check_sendable(host)
        shape = tuple(host.shape)
        padding = [0] * (MAX_DIMS - len(shape))
        self.header = _HEADER.pack(_DTYPE_INDEX[host.dtype], len(shape), *shape, *padding)
        self.header_spec = [self.header, MPI.BYTE]
        whole, address = host.nbytes, host.data_ptr()
        starts = range(0, whole, CHUNK_BYTES) if whole > INLINE_BYTES else ()
        self.chunks = [
            [MPI.memory.fromaddress(address + start, min(CHUNK_BYTES, whole - start)), MPI.BYTE] for start in starts
        ]
        inline = bool(whole) and not self.chunks
        self.view = memoryview(MPI.memory.fromaddress(address, whole) if inline else bytearray())  # type: ignore[arg-type]
        self.size = len(self.view)
        self.boxes: list[_Box] = []

    def box(self) -> _Box:
        return _Box(self.header, self.size)


class _Send:
    __slots__ = ("_crowded", "_kept", "_requests")

    def __init__(self, requests: list[MPI.Request], crowded: bool, kept: object) -> None:  # noqa: FBT001  hot path
        self._requests = requests
        self._crowded = crowded
        self._kept = kept  # MPI reads these buffers until the requests are complete

    def wait(self) -> None:
        wait_all(self._requests, crowded=self._crowded)


class _InlineSend:
    __slots__ = ("_box", "_boxes", "_crowded", "_request")

    def __init__(self, request: MPI.Request, crowded: bool, boxes: list[_Box], box: _Box) -> None:  # noqa: FBT001
        self._request = request
        self._crowded = crowded
        self._boxes = boxes
        self._box: _Box | None = box

    def wait(self) -> None:
        if self._box is not None:
            _wait(self._request, crowded=self._crowded)
            self._boxes.append(self._box)
            self._box = None


class _Receive:
    __slots__ = ("_socket", "box", "host", "layout", "requests", "source", "tensor")

    def __init__(
        self,
        socket: MpiSocket,
        requests: list[MPI.Request],
        layout: _Layout,
        box: _Box,
        tensor: Tensor,
        host: Tensor,
        source: Rank,
    ) -> None:
        self._socket: MpiSocket | None = socket
        self.requests = requests  # the header's, then those of the chunks
        self.layout = layout
        self.box = box
        self.tensor = tensor
        self.host = host
        self.source = source

    def wait(self) -> None:
        if self._socket is not None:
            socket, self._socket = self._socket, None
            socket.accept(self)


def _wait(request: MPI.Request, *, crowded: bool) -> None:
    for _ in range(_TESTS_IF_CROWDED if crowded else _TESTS):
        if request.Test():
            return
    wait_all([request], crowded=crowded)


def wait_all(requests: list[MPI.Request], *, crowded: bool) -> None:
    """Test until all requests are complete.

    The first tests follow each other at once, for at most some fifty microseconds: an answer that is on its way comes
    sooner than the scheduler would give the core back. With a core for each rank the wait yields and stays quick. With fewer cores it soon sleeps, an eighth of the time
    waited so far, between 50 µs and 1 ms: a rank that spins would take its core from one that computes.
    """
    for _ in range(_TESTS_IF_CROWDED if crowded else _TESTS):
        if MPI.Request.Testall(requests):
            return
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


def _described(header: bytes) -> str:
    dtype, dims, *shape = _HEADER.unpack(header)
    return f"{str(DTYPES[dtype]).removeprefix('torch.')} of shape {tuple(shape[:dims])}"
