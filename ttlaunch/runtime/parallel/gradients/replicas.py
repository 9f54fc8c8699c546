"""Wraps a model in torch's own data parallelism, which `reduction: fast` uses, and records its all-reduces.

The flight recorder has each all-reduce, so if a rank hangs or dies within one, the launcher reports its bucket and step. The timeline
of a traced run has them too.
"""

import importlib
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ttlaunch.flight_recorder import BEGUN_COLLECTIVE, DATA_PARALLEL_START, GROUP
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter
from ttlaunch.runtime.world import Rank

_NAME = "torch's all_reduce"
_now = time.monotonic_ns


def replicate(ctx: RankContext, model: nn.Module, *, among: Sequence[Rank]) -> DistributedDataParallel:
    """Wrap a model so that every backward pass averages its gradients over the ranks of torch's process group.

    Args:
        ctx: Every rank of `among` must call. Only where it keeps a flight recorder or a timeline, the all-reduces go
            through a hook that records them.
        model: Equal on all ranks, float32.
        among: The ranks of the group.

    Cost: torch broadcasts the weights once; in each backward pass an all-reduce for each bucket of 25 MB.
    Order: torch's; the bits may differ with the number of ranks and the backend.
    Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (  # noqa: PLC0415  it imports a lot
        allreduce_hook,
    )

    with ctx.announced("import"):
        importlib.import_module("torch._dynamo")  # DistributedDataParallel imports it, which takes seconds
    recorder = ctx.traffic.recorder
    with nullcontext() if recorder is None else recorder.meeting(DATA_PARALLEL_START, tag=recorder.join_group(among)):
        replica = DistributedDataParallel(model)
    if recorder is None and ctx.traffic.trace is None:
        return replica
    records = AllReduceRecords(ctx.traffic, among)

    def all_reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]  # torch re-exports it without saying so
        size = bucket.buffer().nbytes
        began = records.begin(bucket.index(), size)
        done = allreduce_hook(state, bucket).then(partial(records.end, bucket=bucket.index(), size=size, began=began))
        if bucket.is_last():
            records.begin_wait()
        return done

    replica.register_comm_hook(None, all_reduce)
    return replica


class AllReduceRecords:
    """Records the all-reduces of a backward pass: the begin of each, the wait for them after the last begin, their ends.

    An all-reduce ends in a thread of torch's, at any time after its begin, while the main thread is in the backward pass.

    Cost: under 1 µs for an operation in the flight recorder; no message.
    """

    def __init__(self, traffic: TrafficCounter, among: Sequence[Rank]) -> None:
        self._traffic = traffic
        self._recorder = traffic.recorder
        self._tag = 0 if self._recorder is None else self._recorder.join_group(among)
        self._open: dict[int, int] = {}  # bucket to the offset of its entry

    def begin(self, bucket: int, size: int) -> int:
        """Record that an all-reduce begins while the backward pass continues; return the time, nanoseconds."""
        now = _now()
        if self._recorder is not None:
            self._open[bucket] = self._recorder.begin(
                BEGUN_COLLECTIVE, (_NAME, bucket), None, peer=GROUP, tag=self._tag, size=size, now=now
            )
        return now

    def begin_wait(self) -> None:
        """Record that the last all-reduce has begun: from here on the rank does nothing but wait for them."""
        if self._recorder is not None:
            for offset in list(self._open.values()):
                self._recorder.begin_wait(offset)

    def end(self, done: torch.futures.Future[Tensor], *, bucket: int, size: int, began: int) -> Tensor:
        """Record that an all-reduce is done, and return its result."""
        trace, offset = self._traffic.trace, self._open.pop(bucket, None)
        if trace is not None and trace.is_open:
            trace.span("all_reduce (torch)", "collective", began=began, ended=_now(), bucket=bucket, bytes=size)
        if self._recorder is not None and offset is not None:
            self._recorder.end(offset, _now())
        return done.value()
