"""Counts the collectives of torch's FSDP2: how many there were, of what size, and how long they took.

Each call is counted with the bytes that a ring moves: (n - 1)/n of the whole vector, to the next rank. Both gloo and
NCCL document a ring; how they cut it into messages is not visible here. If FSDP2 gathers once too often, or reduces where
`no_sync` should have prevented it, the counted traffic differs from the formula. The flight recorder has the calls too,
so the report of a hang names the operation and the unit. If there is a timeline, it shows them.

On CUDA devices a call returns as soon as it is queued on a stream, so the measured time is that of queueing it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from ttlaunch.flight_recorder import COLLECTIVE, GROUP
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.world import Rank

WEIGHTS, GRADIENTS, COPIES = "weights (torch)", "gradients (torch)", "replicas (torch)"
"""Operations: all-gather of weights, reduce-scatter of gradients, all-reduce of gradient shards over replicas."""


class Ring:
    """A group of ranks whose collectives are counted.

    The ranks shard one replica of the parameters, or have the same rows of each replica.
    """

    def __init__(self, traffic: TrafficCounter, *, rank: Rank, among: Sequence[Rank]) -> None:
        self._traffic = traffic
        self._size = len(among)
        self._next = among[(among.index(rank) + 1) % len(among)]
        self._tag = 0 if traffic.recorder is None else traffic.recorder.join_group(among)

    @contextmanager
    def operation(self, name: str, *, unit: int, whole: int, times: int = 1) -> Iterator[None]:
        """Count and time the collective that runs in this block; `whole` is the size of its full vector in bytes."""
        began = time.monotonic_ns()
        recorder, offset = self._traffic.recorder, 0
        if recorder is not None:
            offset = recorder.begin(COLLECTIVE, (name, unit), None, peer=GROUP, tag=self._tag, size=whole, now=began)
        yield
        self.count(name, unit=unit, whole=whole, times=times, began=began)
        if recorder is not None:
            recorder.end(offset, time.monotonic_ns())

    def count(self, name: str, *, unit: int, whole: int, times: int = 1, began: int | None = None) -> None:
        """Count a collective that has ended.

        Args:
            name: The operation's name.
            unit: The number of the FSDP unit.
            whole: The bytes of the full vector.
            times: How often a ring moves (n - 1)/n of the vector: once, or twice in an all-reduce.
            began: When the rank began to wait, nanoseconds; None: the time is unknown and is not counted.
        """
        now = time.monotonic_ns()
        if self._size > 1:
            self._traffic.sent((name, None), self._next, times * (self._size - 1) * whole // self._size)
        if began is None:
            return
        self._traffic.waited(name, now - began)
        if self._traffic.trace is not None and self._traffic.trace.is_open:
            self._traffic.trace.span(name, "collective", began=began, ended=now, unit=unit, bytes=whole)


class _Gather(DefaultAllGather):
    def __init__(self, ring: Ring, unit: int) -> None:
        self._ring, self._unit = ring, unit

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *how: Any, **named: Any) -> dist.Work | None:
        with self._ring.operation(WEIGHTS, unit=self._unit, whole=output_tensor.nbytes):
            return super().__call__(output_tensor, input_tensor, *how, **named)


class _Reduce(DefaultReduceScatter):
    def __init__(self, ring: Ring, unit: int) -> None:
        self._ring, self._unit = ring, unit

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *how: Any, **named: Any) -> dist.Work:
        with self._ring.operation(GRADIENTS, unit=self._unit, whole=input_tensor.nbytes):
            return super().__call__(output_tensor, input_tensor, *how, **named)


def count_collectives(units: Sequence[FSDPModule], *, shards: Ring, replicas: Ring | None) -> None:
    """Count every collective of FSDP's units in the rank's traffic counter.

    Args:
        units: The units in the order of the model.
        shards: The ranks that shard one replica of the parameters.
        replicas: The ranks with the same rows of each replica; None: there is one replica.
    """
    for number, unit in enumerate(units):
        unit.set_custom_all_gather(_Gather(shards, number))
        unit.set_custom_reduce_scatter(_Reduce(shards, number))
        if replicas is not None:
            unit.set_all_reduce_hook(partial(_count_copies, replicas, number))


def _count_copies(ring: Ring, unit: int, rows: Tensor) -> None:
    """Count the all-reduce that has added up a unit's rows of gradients over the replicas; a ring moves them twice."""
    ring.count(COPIES, unit=unit, whole=rows.nbytes, times=2)
