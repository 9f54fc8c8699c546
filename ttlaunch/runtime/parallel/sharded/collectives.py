"""Counts the collectives of torch's FSDP2: how many there were, of what size, and how long they took.

What is counted is each call, and for it what a ring moves: n - 1 of n parts of the whole vector, to the next rank.
(Which messages gloo or NCCL cut it into is theirs; a ring is what both document.) So a gather too many, or a reduction
that `no_sync` should have held back, shows in the counted traffic against the formula. They are also in the flight
recorder, so that a hang within one is reported by name and unit, and in the timeline if there is one.

On CUDA devices a call returns when it has been put in a stream, so there times are those of the call.
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
"""Operations: gathering rows of weights, reducing gradients to rows, and adding up those rows over replicas."""


class Ring:
    """The ranks that a rank shares parameters with, or those that have the same rows of other replicas."""

    def __init__(self, traffic: TrafficCounter, *, rank: Rank, among: Sequence[Rank]) -> None:
        self._traffic = traffic
        self._size = len(among)
        self._next = among[(among.index(rank) + 1) % len(among)]
        self._tag = 0 if traffic.recorder is None else traffic.recorder.join_group(among)

    @contextmanager
    def operation(self, name: str, *, unit: int, whole: int, times: int = 1) -> Iterator[None]:
        """Enter a collective over a vector of so many bytes, during which the rank waits."""
        began = time.monotonic_ns()
        recorder, at = self._traffic.recorder, 0
        if recorder is not None:
            at = recorder.begin(COLLECTIVE, (name, unit), None, peer=GROUP, tag=self._tag, size=whole, now=began)
        yield
        self.enter(name, unit=unit, whole=whole, times=times, began=began)
        if recorder is not None:
            recorder.end(at, time.monotonic_ns())

    def enter(self, name: str, *, unit: int, whole: int, times: int = 1, began: int | None = None) -> None:
        """Enter a collective that is over: the ring's bytes, so many times, and since when the rank has waited."""
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


def enter_collectives(units: Sequence[FSDPModule], *, shards: Ring, replicas: Ring | None) -> None:
    """Count every collective of FSDP's units in the rank's traffic counter.

    Args:
        units: The units in the order of the model.
        shards: The ranks that share the parameters.
        replicas: Those that have the same rows; None: nobody has.
    """
    for number, unit in enumerate(units):
        unit.set_custom_all_gather(_Gather(shards, number))
        unit.set_custom_reduce_scatter(_Reduce(shards, number))
        if replicas is not None:
            unit.set_all_reduce_hook(partial(_enter_copies, replicas, number))


def _enter_copies(ring: Ring, unit: int, rows: Tensor) -> None:
    """The rows of a unit's gradients have been added up over the replicas; an all-reduce moves them twice."""
    ring.enter(COPIES, unit=unit, whole=rows.nbytes, times=2)
