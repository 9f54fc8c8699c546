"""Messages over MPI: raw bytes between buffers, never pickled objects, and waits during which other threads and ranks can use the core.

Every message begins with a header (dtype, shape), so that a receiver can name a mismatch instead of misreading the
bytes. A small tensor travels behind its header in one message, at the price of a copy on both sides; a large one
follows in messages of its own, straight from buffer to buffer. Steps use the same buffers again, so the request of each
buffer, peer and tag is set up once and then only restarted. Open MPI's blocking calls busy-wait, so this module uses none of them
once the ranks are connected.

Tensors of a CUDA device are staged in host memory (`staging.py`). Only the rank's own thread may call MPI, so a send whose copy is
not complete is queued, and begins in a later call of any method of the communicator or of its transfers.
"""

import os
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from mpi4py import MPI
from torch import Tensor

from ttlaunch.runtime.comm.protocol import (
    DTYPES,
    ENV_SYNCHRONOUS_SENDS,
    MAX_DIMS,
    CommunicationError,
    Pending,
    check_sendable,
    described,
)
from ttlaunch.runtime.comm.staging import Arriving, Leaving, Staging, staging_for
from ttlaunch.runtime.world import Rank, World

CHUNK_BYTES = 2**30
"""Counts are 32-bit integers in many MPI libraries; larger tensors travel in several messages."""

INLINE_BYTES = 2**14
"""The largest tensor that travels in one message with its header: here a copy costs less than a second message."""

_HEADER = struct.Struct(f"={2 + MAX_DIMS}q")
_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(DTYPES)}
_MOST_LAYOUTS, _MOST_VIEWS = 4096, 256

_POLLS = 200
_POLLS_IF_OVERSUBSCRIBED = 20
_YIELDING_POLLS = 200
_FIRST_SLEEP_S = 5e-5
_LONGEST_SLEEP_S = 1e-3
_YIELDS_S = 2e-3
_LONGEST_SLEEP_WITH_A_CORE_S = 2e-4


_Route = tuple[int, int]
"""A peer and a tag."""

_Requests = list[MPI.Prequest]
_NO_CHUNKS: _Requests = []
_NOTHING = memoryview(b"")


class MpiCommunicator:
    """Tensors between the ranks of a world, over a communicator of its own.

    Collective: every rank of `comm` must make one, in the same order. CUDA tensors travel through pinned host memory, and are
    copied there while the rank goes on.

    Cost: a tensor of up to `INLINE_BYTES` takes one message, of its bytes and an 80-byte header. A larger one takes a
    message of 80 bytes, and one more for each `CHUNK_BYTES`.
    """

    def __init__(self, comm: MPI.Intracomm, *, world: World, rank: Rank, staging: Staging | None = None) -> None:
        """Join the ranks of `comm`; None for `staging`: that of CUDA devices, once a tensor of one is sent or received."""
        self.rank = rank
        # In a communicator of its own no message of torch's or of a recipe's own use of MPI can match one of these.
        self._comm = comm.Dup()
        self._peers = [f"rank {peer} ({role})" for peer, role in enumerate(world.roles)]
        self._oversubscribed = world.is_oversubscribed(rank)
        synchronous = os.environ.get(ENV_SYNCHRONOUS_SENDS) == "1"
        prepare: Any = self._comm.Ssend_init if synchronous else self._comm.Send_init
        self._prepare: Callable[..., MPI.Prequest] = prepare
        self._layouts: dict[tuple[int, torch.dtype, torch.Size], _Layout] = {}
        self._headers: defaultdict[_Route, list[_HeaderBuffer]] = defaultdict(list)
        self._staging = staging
        self.queued: dict[_Route, deque[_QueuedSend]] = {}
        self._held: set[Leaving | Arriving] = (
            set()
        )  # MPI reads or writes their memory, also if nobody waits for the transfer

    def send(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> None:
        """Send and wait."""
        if self._staging is not None or not tensor.is_cpu:
            self.isend(tensor, dest=dest, tag=tag).wait()
            return
        # What `isend` and `wait` do, without an object for each message.
        idle, sending = self._begin_send(self._layout(tensor), tensor, dest=dest, tag=tag)
        for request in sending.requests:
            wait_for(request, self._oversubscribed)
        idle.append(sending)

    def recv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> None:
        """Receive and wait.

        Raises:
            CommunicationError: The message has another dtype or shape.
        """
        if self._staging is not None or not tensor.is_cpu:
            self.irecv(tensor, source=source, tag=tag).wait()
            return
        layout = self._layout(tensor)
        buffer, chunks = self._begin_receive(layout, source, tag)
        self._finish_receive(layout, buffer, chunks, source=source, tag=tag, host=tensor)

    def isend(self, tensor: Tensor, *, dest: Rank, tag: int = 0) -> Pending:
        if self._staging is None and tensor.is_cpu:
            idle, sending = self._begin_send(self._layout(tensor), tensor, dest=dest, tag=tag)
            return _Send(self, sending, idle, kept=tensor)
        staging = self._staging = staging_for(tensor, self._staging)
        leaving = None if staging is None else staging.leave(tensor, dest=dest, tag=tag)
        host = tensor if leaving is None else leaving.host
        message = _QueuedSend(self, self._layout(host), dest=dest, tag=tag, leaving=leaving, kept=host)
        if leaving is not None:
            self._held.add(leaving)
        # Also a tensor that needs no copy: it must not overtake those before it.
        self.queued.setdefault((dest, tag), deque()).append(message)
        self.advance()
        return message

    def irecv(self, tensor: Tensor, *, source: Rank, tag: int = 0) -> Pending:
        arriving = None if self._staging is None and tensor.is_cpu else self._arrive(tensor, source, tag)
        host = tensor if arriving is None else arriving.host
        layout = self._layout(host)
        buffer, chunks = self._begin_receive(layout, source, tag)
        return _Receive(self, layout, buffer, chunks=chunks, host=host, arriving=arriving, source=source, tag=tag)

    def wait_any(self, pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
        return wait_for_any(pending, timeout_s=timeout_s)

    def barrier(self) -> None:
        """Wait for every rank, asleep where ranks outnumber cores; all sends of this rank have begun before. Collective."""
        self._begin_queued()
        wait_for(self._comm.Ibarrier(), self._oversubscribed)

    def close(self) -> None:
        """Begin what is queued; MPI frees its resources when the world ends."""
        self._begin_queued()

    def advance(self) -> None:
        """Begin the queued sends whose copies are complete, in the order of each peer and tag."""
        for route, sends in list(self.queued.items()):
            while sends and sends[0].can_begin():
                sends.popleft().begin()
            if not sends:
                del self.queued[route]

    def complete(self, request: "_Testable") -> None:
        """Wait for a request, and begin queued sends meanwhile: the peer may need one of them before it completes the request."""
        wait_for(_Advancing(self, request.Test) if self.queued else request, self._oversubscribed)

    def release(self, staged: Leaving | Arriving) -> None:
        """Note that MPI neither reads nor writes this host memory any more."""
        self._held.discard(staged)

    def _arrive(self, tensor: Tensor, source: Rank, tag: int) -> Arriving | None:
        """Make room for a tensor that is received, if it is staged."""
        self.advance()
        staging = self._staging = staging_for(tensor, self._staging)
        arriving = None if staging is None else staging.arrive(tensor, source=source, tag=tag)
        if arriving is not None:
            self._held.add(arriving)
        return arriving

    def _begin_queued(self) -> None:
        """Return when no send is queued; copies need nothing from other ranks, so this ends."""
        while self.queued:
            for sends in list(self.queued.values()):
                sends[0].wait_for_copy()
            self.advance()

    def _layout(self, host: Tensor) -> "_Layout":
        """Return the kept layout of a buffer with this dtype and shape, and this address if it is large, or make it."""
        key = (host.data_ptr() if host.nbytes > INLINE_BYTES else 0, host.dtype, host.shape)
        layout = self._layouts.get(key)
        if layout is None or not host.is_contiguous():  # strides are not in the key; `_Layout` refuses the tensor
            # Recipes whose large tensors lie elsewhere in each step would otherwise collect requests without end.
            while len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts))).free()  # the oldest
            layout = self._layouts[key] = _Layout(host)
        return layout

    def _begin_send(
        self, layout: "_Layout", host: Tensor, *, dest: Rank, tag: int
    ) -> "tuple[list[_Sending], _Sending]":
        """Start one of the idle send requests of a buffer, or a new one; the caller returns it to the idle ones when it is complete."""
        idle = layout.sends[dest, tag]
        if idle:
            sending = idle.pop()
        else:
            buffer = None if layout.chunks else _HeaderBuffer(layout.header, layout.size)
            specs = [buffer.spec] if buffer else [layout.header_spec, *layout.chunks]
            sending = _Sending([self._prepare(spec, dest, tag) for spec in specs], buffer)
        sending.start(layout.bytes_of(host) if layout.size else _NOTHING)
        return idle, sending

    def _begin_receive(self, layout: "_Layout", source: Rank, tag: int) -> "tuple[_HeaderBuffer, _Requests]":
        """Start to receive a message with a header and perhaps a small tensor, and for a large tensor also its chunks."""
        buffers = self._headers[source, tag]
        buffer = buffers.pop() if buffers else _HeaderBuffer(b"", INLINE_BYTES)
        if buffer.request is None:
            buffer.request = self._comm.Recv_init(buffer.spec, source, tag)
        buffer.request.Start()
        if not layout.chunks:
            return buffer, _NO_CHUNKS
        idle = layout.receives[source, tag]
        chunks = idle.pop() if idle else [self._comm.Recv_init(spec, source, tag) for spec in layout.chunks]
        for request in chunks:
            request.Start()
        return buffer, chunks

    def _finish_receive(
        self, layout: "_Layout", buffer: "_HeaderBuffer", chunks: _Requests, *, source: Rank, tag: int, host: Tensor
    ) -> None:
        """Wait for the header, then, if it matches, for the messages that follow it."""
        self.complete(buffer.request or MPI.REQUEST_NULL)
        if not buffer.data.startswith(layout.header):
            # The chunks that these receives expect will not come; left open, the receives would take later messages.
            for request in chunks:
                request.Cancel()
            sent = _described(bytes(buffer.data[: _HEADER.size]))
            raise CommunicationError(f"{self._peers[source]} sent {sent}, expected {described(host)}")
        if chunks:
            for request in chunks:
                self.complete(request)
            layout.receives[source, tag].append(chunks)
        elif layout.size:
            layout.bytes_of(host)[:] = buffer.payload[: layout.size]
        self._headers[source, tag].append(buffer)


class _HeaderBuffer:
    """Room for a header and a small tensor behind it."""

    def __init__(self, header: bytes, size: int) -> None:
        self.data = bytearray(_HEADER.size + size)
        self.data[: len(header)] = header
        self.payload = memoryview(self.data)[_HEADER.size :]
        self.spec = [MPI.memory.frombuffer(self.data), MPI.BYTE]
        self.request: MPI.Prequest | None = None  # of the receive that fills it


class _Layout:
    """How buffers of a dtype and a shape are sent and received; holds the address of a large one, but not its memory.

    A small tensor is copied into the buffer behind a header, so what sends it is the same wherever the tensor lies.
    """

    def __init__(self, host: Tensor) -> None:
        check_sendable(host)
        shape = tuple(host.shape)
        padding = [0] * (MAX_DIMS - len(shape))
        self.header = _HEADER.pack(_DTYPE_INDEX[host.dtype], len(shape), *shape, *padding)
        self.header_spec = [self.header, MPI.BYTE]
        size, address = host.nbytes, host.data_ptr()
        starts = range(0, size, CHUNK_BYTES) if size > INLINE_BYTES else ()
        self.chunks = [
            [MPI.memory.fromaddress(address + start, min(CHUNK_BYTES, size - start)), MPI.BYTE] for start in starts
        ]
        self.size = 0 if self.chunks else size  # what follows the header in the same message
        self._views: dict[int, memoryview] = {}  # by address
        self.sends: defaultdict[_Route, list[_Sending]] = defaultdict(list)  # idle requests
        # Idle requests for the chunks; those for headers are in `MpiCommunicator._headers`.
        self.receives: defaultdict[_Route, list[_Requests]] = defaultdict(list)

    def bytes_of(self, host: Tensor) -> memoryview:
        """Return the memory of a small tensor that is not empty; it may be used for as long as the tensor lives."""
        address = host.data_ptr()
        view = self._views.get(address)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            view = self._views[address] = memoryview(MPI.memory.fromaddress(address, self.size))  # type: ignore[arg-type]
        return view

    def free(self) -> None:
        """Free the idle requests of this buffer; transfers under way keep theirs."""
        sends = [sending.requests for idle in self.sends.values() for sending in idle]
        receives = [chunks for idle in self.receives.values() for chunks in idle]
        for request in (request for requests in [*sends, *receives] for request in requests):
            request.Free()
        self.sends.clear()
        self.receives.clear()


class _Sending:
    """The requests that send buffers of one layout to one peer under one tag; they carry one transfer at a time."""

    __slots__ = ("_buffer", "requests")

    def __init__(self, requests: _Requests, buffer: _HeaderBuffer | None) -> None:
        self.requests = requests
        self._buffer = buffer

    def start(self, content: memoryview) -> None:
        if self._buffer is not None:
            self._buffer.payload[:] = content
        for request in self.requests:
            request.Start()


class _Testable(Protocol):
    def Test(self) -> bool: ...


class _Advancing:
    """What a rank waits for while it has sends to begin."""

    __slots__ = ("_communicator", "_is_complete")

    def __init__(self, communicator: MpiCommunicator, is_complete: Callable[[], bool]) -> None:
        self._communicator = communicator
        self._is_complete = is_complete

    def Test(self) -> bool:
        self._communicator.advance()
        return self._is_complete()


class _Send:
    __slots__ = ("_communicator", "_idle", "_kept", "_sending")

    def __init__(self, communicator: MpiCommunicator, sending: _Sending, idle: list[_Sending], *, kept: object) -> None:
        self._communicator = communicator
        self._sending: _Sending | None = sending
        self._idle = idle
        self._kept = kept  # MPI reads this buffer until the requests are complete

    def wait(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            for request in sending.requests:
                self._communicator.complete(request)
            # Only now: a persistent request must be complete before it is started again.
            self._idle.append(sending)
            self._kept = None

    def test(self) -> bool:
        if self._communicator.queued:
            self._communicator.advance()
        return self._sending is None or all(request.Test() for request in self._sending.requests)


class _QueuedSend:
    """A send that begins when its tensor has been copied, and those before it to the same peer with the same tag have begun."""

    __slots__ = ("_begin", "_begun", "_communicator", "_leaving")

    def __init__(
        self,
        communicator: MpiCommunicator,
        layout: _Layout,
        *,
        dest: Rank,
        tag: int,
        leaving: Leaving | None,
        kept: Tensor,
    ) -> None:
        def begin() -> _Send:
            idle, sending = communicator._begin_send(layout, kept, dest=dest, tag=tag)  # noqa: SLF001 - a part of the communicator
            return _Send(communicator, sending, idle, kept=kept)

        self._communicator = communicator
        self._begin = begin
        self._begun: _Send | None = None
        self._leaving = leaving

    def can_begin(self) -> bool:
        return self._leaving is None or self._leaving.is_copied()

    def wait_for_copy(self) -> None:
        if self._leaving is not None:
            self._leaving.wait()

    def begin(self) -> None:
        self._begun = self._begin()

    def wait(self) -> None:
        if self._begun is None:
            self._communicator.complete(_Advancing(self._communicator, lambda: self._begun is not None))
        assert self._begun is not None  # noqa: S101 - `complete` has waited for it
        self._begun.wait()
        if self._leaving is not None:
            self._communicator.release(self._leaving)
            self._leaving.end()

    def test(self) -> bool:
        self._communicator.advance()
        return self._begun is not None and self._begun.test()


class _Receive:
    __slots__ = ("_arriving", "_buffer", "_chunks", "_communicator", "_host", "_layout", "_source", "_tag")

    def __init__(
        self,
        communicator: MpiCommunicator,
        layout: _Layout,
        buffer: _HeaderBuffer,
        *,
        chunks: _Requests,
        host: Tensor,
        arriving: Arriving | None,
        source: Rank,
        tag: int,
    ) -> None:
        self._communicator: MpiCommunicator | None = communicator
        self._layout = layout
        self._buffer = buffer
        self._chunks = chunks
        self._host = host
        self._arriving = arriving
        self._source = source
        self._tag = tag

    def wait(self) -> None:
        if self._communicator is not None:
            communicator, self._communicator = self._communicator, None
            communicator._finish_receive(  # noqa: SLF001  this class is a part of the communicator
                self._layout, self._buffer, self._chunks, source=self._source, tag=self._tag, host=self._host
            )
            if self._arriving is not None:
                communicator.release(self._arriving)
                self._arriving.end()

    def test(self) -> bool:
        if self._communicator is None:
            return True
        if self._communicator.queued:
            self._communicator.advance()
        if self._buffer.request is None or not self._buffer.request.Test():
            return False
        fits = self._buffer.data.startswith(self._layout.header)  # if not, `wait()` raises
        # After a header that does not fit, the chunks may never arrive.
        return not fits or all(request.Test() for request in self._chunks)


def _described(header: bytes) -> str:
    dtype, dims, *shape = _HEADER.unpack(header)
    return f"{str(DTYPES[dtype]).removeprefix('torch.')} of shape {tuple(shape[:dims])}"


def wait_for(request: _Testable, oversubscribed: bool) -> None:  # noqa: FBT001  hot path
    """Poll until the request is complete.

    At first the rank polls without a pause, for at most some 50 µs: an answer that is on its way arrives before the
    scheduler would give the core back. If each rank has a core, the rank then yields between polls for 2 ms, and reacts quickly;
    a rank that waits longer, such as one of a server that nobody asks, sleeps up to 0.2 ms between polls.
    With fewer cores it soon sleeps, an eighth of the time waited so far, between 50 µs and 1 ms, because a rank that
    polls takes the core from a rank that computes.
    """
    for _ in range(_POLLS_IF_OVERSUBSCRIBED if oversubscribed else _POLLS):
        if request.Test():
            return
    for _ in range(_YIELDING_POLLS):
        if request.Test():
            return
        os.sched_yield()
    began = time.monotonic()
    while not request.Test():
        if oversubscribed:
            _sleep(began, longest_s=_LONGEST_SLEEP_S)
        elif time.monotonic() - began > _YIELDS_S:
            _sleep(began, longest_s=_LONGEST_SLEEP_WITH_A_CORE_S)
        else:
            os.sched_yield()


def wait_for_any(pending: Sequence[Pending], *, timeout_s: float | None = None) -> int | None:
    """Poll transfers in order and return the index of the first complete one, or None after `timeout_s`.

    The next message may take as long as the computation of a whole step, so this wait soon sleeps between polls,
    whatever the number of cores.
    """
    began, rounds = time.monotonic(), 0
    while True:
        for place, transfer in enumerate(pending):
            if transfer.test():
                return place
        if timeout_s is not None and time.monotonic() - began >= timeout_s:
            return None
        rounds += 1
        if rounds > _POLLS_IF_OVERSUBSCRIBED:
            _sleep(began, longest_s=_LONGEST_SLEEP_S)


def _sleep(began: float, *, longest_s: float) -> None:
    """Sleep for an eighth of the time waited since `began`, within bounds."""
    time.sleep(min(longest_s, max(_FIRST_SLEEP_S, (time.monotonic() - began) / 8)))
