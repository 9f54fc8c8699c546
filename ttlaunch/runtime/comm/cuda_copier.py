"""Copies between CUDA devices and pinned host memory, on streams of their own; see `staging.py`.

Only ranks that send or receive a tensor of a CUDA device import this module.
"""

import mmap
from contextlib import suppress
from weakref import finalize

import torch
from torch import Tensor

_PORTABLE = 1  # pinned for all devices of the process


class CudaCopier:
    """Copies that run beside the computation: one stream from each device, one to it.

    Two, because a copy from the device may have to wait long for the computation, and a copy to it must not wait with it.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def takes(self, tensor: Tensor) -> bool:
        return not tensor.is_cpu

    def allocate(self, size: int) -> Tensor:
        # Memory of our own, which is registered: other processes can copy from it, as some transports of MPI let them, and it
        # is given back to the system when it is freed.
        memory = mmap.mmap(-1, size)
        room = torch.frombuffer(memory, dtype=torch.uint8)
        address, runtime = room.data_ptr(), torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, size, _PORTABLE)) == 0:
            finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        else:  # the system does not let so much be pinned: copies stop the rank for a while, and are as right
            with suppress(RuntimeError):  # the next kernel would report the error of the call above as its own
                torch.zeros(1, device="cuda")
        return room

    def now(self, tensor: Tensor) -> torch.cuda.Event:
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(tensor.device))
        return mark

    def fetch(self, tensor: Tensor, host: Tensor) -> "_CudaCopied":
        stream, _ = self._streams_of(tensor)
        stream.wait_event(self.now(tensor))
        return _copy(host, tensor, stream)

    def fill(self, tensor: Tensor, host: Tensor, *, since: object) -> "_CudaCopied":
        _, stream = self._streams_of(tensor)
        assert isinstance(since, torch.cuda.Event)  # noqa: S101 - from `now`
        stream.wait_event(since)
        copied = _copy(tensor, host, stream)
        torch.cuda.current_stream(tensor.device).wait_event(copied.event)
        return copied

    def _streams_of(self, tensor: Tensor) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


class _CudaCopied:
    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


def _copy(into: Tensor, source: Tensor, stream: torch.cuda.Stream) -> _CudaCopied:
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        into.detach().copy_(source.detach(), non_blocking=True)
        done.record(stream)
    return _CudaCopied(done)
